"""A point of a sweep is run by one sweep at a time: whoever holds the lock of its folder.

The kernel holds it for the process and gives it up when that dies, so no lock is ever stale.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FILE = ".lock"


class Busy(Exception):
    """The point is run by another process; the message says which."""


@contextmanager
def held(folder: Path) -> Iterator[int]:
    """The lock of a point's folder. Yields its descriptor: a process that inherits it holds the lock, too.

    Raises `Busy` where another process has it.
    """
    handle = os.open(folder / FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(handle, 200, 0).decode(errors="replace")
            raise Busy(owner or "another sweep") from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, _owner().encode(), 0)
        yield handle
    finally:
        os.close(handle)


def _owner() -> str:
    job = os.environ.get("SLURM_JOB_ID")
    return f"process {os.getpid()} on {socket.gethostname()}" + (f", job {job}" if job else "")
