"""What processes of this machine do one after the other: measuring, which others would disturb, and counting a model,
of which the others then find the result in the cache.

    process A   |measures ......| stores |
    process B        waits               | finds it in the cache, or measures something else

The kernel holds the lock (flock) for the process that has taken it, and gives it up when that ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from harness.host import profile_cache

MEASURING = "measuring"
WAITS = ("waiting", "until another run has profiled or measured")
"""The phase of a run that waits for another one, and more of it."""


@contextmanager
def alone(what: str, waiting: Callable[[str, str], object]) -> Iterator[None]:
    """No other process of this machine, with the same cache, does `what` meanwhile; `waiting` is called once, with
    `WAITS`, if one does. Where the cache cannot be written nothing is waited for."""
    folder = profile_cache.folder().parent / "locks"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(
            folder / f"{socket.gethostname()}-{profile_cache.plain(what)}",
            os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW,
            0o644,
        )
    except OSError:
        yield
        return
    try:
        _take(handle, waiting)
        yield
    finally:
        os.close(handle)


def _take(handle: int, waiting: Callable[[str, str], object]) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        waiting(*WAITS)
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError:
        return  # a file system without locks
