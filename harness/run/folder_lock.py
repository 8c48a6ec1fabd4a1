"""Who uses a run's folder: whoever holds the lock (flock) on its file `.lock`.

    held    a run, a sweep or a task of Slurm takes the lock before it touches a file, and keeps it to the end
    look    a reader asks whether somebody holds it, and who took it last

The kernel holds the lock for the processes that have its descriptor and gives it up when the last one ends, so it is
never stale. A process that has the descriptor, taken or inherited, is not refused by its own lock.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from harness.core.run_files import LOCK, LOCK_VARIABLE
from harness.core.serialization import Document, SchemaError, parse

PATIENCE_S = 1.0
"""Seconds that a starting run tries to lock: a reader has the lock for an instant, ranks outlive a killed parent."""
_POLL_S = 0.01
_OWNER_BYTES = 1000
_held: dict[tuple[int, int], int] = {}
"""The descriptors of the locks that this process has, by device and inode of the file."""


@dataclass(frozen=True)
class Owner(Document):
    """Who took the lock; the content of the file."""

    process: int
    host: str
    job: str | None = None

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}" + (f", job {self.job}" if self.job else "")

    @property
    def here(self) -> bool:
        return self.host == socket.gethostname()


class Busy(Exception):
    """The folder is in use by another process; the message says which."""


@dataclass(frozen=True)
class Lock:
    """A lock that is held: its `descriptor`, and whether it was `taken` here, not by a caller or a parent process."""

    descriptor: int
    taken: bool


@dataclass(frozen=True)
class Seen:
    """The lock as a reader sees it: whether it is held (None: unknown), and who took it last."""

    held: bool | None
    owner: Owner | None = None


@contextmanager
def held(folder: Path, patience_s: float = 0.0) -> Iterator[Lock]:
    """The lock of a folder.

    Raises `Busy` where another process has had it for `patience_s`, and OSError where the file cannot be opened or
    locked.
    """
    adopt(folder)
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    try:
        place = _place(handle)
        if place in _held:
            yield Lock(_held[place], taken=False)
            return
        _take(handle, time.monotonic() + patience_s)
        _held[place] = handle
        try:
            yield Lock(handle, taken=True)
        finally:
            del _held[place]
    finally:
        os.close(handle)


def adopt(folder: Path) -> None:
    """Take over the lock of this folder that the parent process has handed on; what this process starts does not get
    it."""
    given = os.environ.get(LOCK_VARIABLE, "")
    with suppress(ValueError, OSError):
        descriptor = int(given)
        if (place := _place(descriptor)) == _place_of(folder / LOCK):
            del os.environ[LOCK_VARIABLE]
            os.set_inheritable(descriptor, False)
            _held[place] = descriptor


def handed_on(lock: Lock) -> dict[str, int]:
    """The descriptor that a process inherits with the lock, by the environment variable that says its number to it."""
    return {LOCK_VARIABLE: lock.descriptor}


def look(folder: Path) -> Seen:
    """Whether somebody holds the lock of a folder; it is tried for an instant."""
    try:
        handle = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return Seen(False)
    except OSError:
        return Seen(None)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return Seen(False, _owner(handle))
    except BlockingIOError:
        return Seen(True, _owner(handle))
    except OSError:
        return Seen(None, _owner(handle))
    finally:
        os.close(handle)


def _take(handle: int, deadline_s: float) -> None:
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                raise Busy(str(_owner(handle) or "another process")) from None
            time.sleep(_POLL_S)
    with suppress(OSError):  # on a full disk the lock holds, and says not whose it is
        os.ftruncate(handle, 0)
        own = Owner(os.getpid(), socket.gethostname(), os.environ.get("SLURM_JOB_ID"))
        os.pwrite(handle, json.dumps(own.to_json()).encode(), 0)


def _owner(handle: int) -> Owner | None:
    try:
        return Owner.from_json(parse(os.pread(handle, _OWNER_BYTES, 0)))
    except (OSError, SchemaError):
        return None


def _place(handle: int) -> tuple[int, int]:
    found = os.fstat(handle)
    return found.st_dev, found.st_ino


def _place_of(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino
