"""Files of the user's folder that cannot be used: counted, and reported in one warning."""

from __future__ import annotations

import warnings

NAMED = 5
"""Number of files that are named for each reason."""


class LeftOut:
    """File names by reason, such as "cannot be read"."""

    def __init__(self) -> None:
        self._names: dict[str, list[str]] = {"cannot be read": [], "without a mask": []}

    def broken(self, name: str, error: Exception) -> None:
        """A file on which its decoder raised `error`."""
        self._names["cannot be read"].append(f"{name} ({type(error).__name__})")

    def bare(self, name: str) -> None:
        """An image without a mask, where others have one."""
        self._names["without a mask"].append(name)

    def __str__(self) -> str:
        return "; ".join(
            f"{len(names)} {why}: {', '.join(names[:NAMED])}{', ...' if len(names) > NAMED else ''}"
            for why, names in self._names.items()
            if names
        )

    def warn(self, folder: str, files: int) -> None:
        """Say how many of the folder's `files` images are left out, and why; nothing if none is."""
        count = sum(map(len, self._names.values()))
        if count:
            warnings.warn(f"data.folder {folder}: {count} of {files} images are left out: {self}", stacklevel=3)
