"""The processes of a test, and what they leave in shared memory."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
SOON_S = 10.0


def children() -> set[int]:
    """The processes that this one has started, zombies included."""
    found = set()
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the thread has ended since
            found |= set(map(int, (thread / "children").read_text().split()))
    return found


def there(pid: int) -> bool:
    """Whether a process runs; one that ended and waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second one: it ended between opening and reading
        return False


def left(pids: set[int]) -> list[int]:
    """Those of these processes that stay: on a busy machine one that is about to end takes a while."""
    deadline = time.monotonic() + SOON_S
    while any(map(there, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return sorted(filter(there, pids))


def running(*words: str) -> list[int]:
    """Those that have all these words somewhere in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended since
            command = path.read_bytes()
            found += [int(path.parent.name)] if all(word.encode() in command for word in words) else []
    return sorted(found)


def shared_memory() -> set[str]:
    """The files of MPI and torch in shared memory."""
    return {name for name in os.listdir(SHARED_MEMORY) if name.startswith(("mpich", "ucx", "torch_"))}


def left_in_shared_memory(before: set[str]) -> set[str]:
    """Files that are there since `before`, and stay: those of a test that runs at the same time go again."""
    left, deadline = shared_memory() - before, time.monotonic() + SOON_S
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left &= shared_memory()
    return left
