"""Atomic file writes (temporary file, fsync, rename), reading of what a user may have put there, and reading of a JSON
lines file while another process writes it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from harness.core.units import size

DOCUMENT_BYTES = 64 << 20
"""The largest file that is read as a document, a profile of 60,000 layers: a parser takes minutes for GiB of damage."""


def write_bytes(path: Path, data: bytes) -> None:
    """Writes `data` to `path` atomically; after any failure (a full disk) no part of it remains."""
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


def read_bytes(path: Path, most_bytes: int | None = DOCUMENT_BYTES) -> bytes:
    """Returns what is in a regular file of at most so many bytes. Raises OSError for all else: opening a FIFO would
    wait for a writer for ever, and a device may have no end."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        state = os.fstat(handle)
        if not stat.S_ISREG(state.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
        if most_bytes is not None and state.st_size > most_bytes:
            message = f"has {size(state.st_size)}, at most {size(most_bytes)} are read"
            raise OSError(errno.EFBIG, message, str(path))
        return file.read()


def write_text(path: Path, text: str) -> None:
    """Writes UTF-8 text to `path` atomically."""
    write_bytes(path, text.encode("utf-8"))


def cut_in_half(path: Path, most_bytes: int) -> None:
    """Truncates a file that processes append to, and that has grown beyond `most_bytes`, to half of that.

    The latest output is lost, and a line says so; later output is appended after it.
    """
    size = path.stat().st_size
    if size > most_bytes:
        os.truncate(path, most_bytes // 2)
        with path.open("ab") as file:
            file.write(f"\n[{size - most_bytes // 2} bytes were printed here and are not kept]\n".encode())


class LineFollower:
    """Reads the lines that another process appends to `path`; skips a last line that is still being written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read = 0

    def new(self) -> list[dict[str, Any]]:
        """Returns the values of the lines that are new since the last call."""
        try:
            if self.path.stat().st_size == self.read:
                return []
        except FileNotFoundError:
            return []
        with self.path.open("rb") as file:
            file.seek(self.read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self.read += len(whole)
        return [json.loads(line) for line in whole.splitlines()]
