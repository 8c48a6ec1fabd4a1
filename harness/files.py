"""Files that are whole or not there: written beside their place, synced, then renamed."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically; on any failure (a full disk) no part of it stays behind."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def write_text(path: Path, text: str) -> None:
    """`write_bytes` for UTF-8 text."""
    write_bytes(path, text.encode("utf-8"))


def shorten(path: Path, most_bytes: int) -> None:
    """Cut a file that processes append to, and that has grown beyond `most_bytes`, to half of that.

    What was written last is lost, and a line says so; what comes now is appended behind it.
    """
    size = path.stat().st_size
    if size > most_bytes:
        os.truncate(path, most_bytes // 2)
        with path.open("ab") as file:
            file.write(f"\n[{size - most_bytes // 2} bytes were printed here and are not kept]\n".encode())
