"""The processes of a test."""

from __future__ import annotations

from pathlib import Path


def children() -> set[int]:
    """The processes that this one has started, zombies included."""
    found = set()
    for thread in Path("/proc/self/task").iterdir():
        found |= set(map(int, (thread / "children").read_text().split()))
    return found


def there(pid: int) -> bool:
    """Whether a process runs; one that ended and waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
