"""How long threads compute, and how long they wait for a core that others keep (Linux; elsewhere nothing is known).

thread  |== on a core ==|.. ready, but without one ..|== on a core ==|          slowed = (2 x == + ..) / (2 x ==)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from harness.host import devices

BUSY = 1.2
"""Ratio of the time with waiting to that without from which on other programs kept the machine busy."""

MESSENGERS = ("gloo", "pt_gloo")
"""Beginnings of the names of threads that move messages."""

QUIET = 0.5
"""Load of each core, the mean of a minute, up to which a machine is taken for one that nothing else uses."""


@dataclass(frozen=True)
class CoreTime:
    """Seconds of a thread since it began: on a core, and ready but without one; whether it moves `messages`."""

    running_s: float = 0.0
    waited_s: float = 0.0
    messages: bool = False


def of_thread(folder: Path = Path("/proc/thread-self")) -> CoreTime:
    """That of this thread, or of the one whose folder in /proc it is; zero where the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        running, waited, *_ = (folder / "schedstat").read_text().split()
        return CoreTime(int(running) / 1e9, int(waited) / 1e9)
    return CoreTime()


def quiet() -> bool:
    """Returns whether the machine had little to do in the last minute; False where the system does not say."""
    with suppress(OSError, AttributeError):
        return os.getloadavg()[0] <= QUIET * devices.cores()
    return False


def of_process() -> dict[str, CoreTime]:
    """Those of all threads of this process, by their ids."""
    with suppress(OSError):
        threads = list(Path("/proc/self/task").iterdir())
        return {one.name: replace(of_thread(one), messages=_moves_messages(one)) for one in threads}
    return {}


def _moves_messages(folder: Path) -> bool:
    with suppress(OSError):
        return (folder / "comm").read_text().startswith(MESSENGERS)
    return False


def slowed(before: Mapping[str, CoreTime], now: Mapping[str, CoreTime]) -> float | None:
    """By how much other programs slowed down the threads of `now` that compute, since `before`: 1 if none waited; None
    if none computed.

    Where a thread that moves messages takes a core from one that computes, that waits for its own process: as many
    seconds of waiting are no other program's.
    """
    spans = [_between(before.get(thread, CoreTime()), after) for thread, after in now.items()]
    running_s = sum(one.running_s for one in spans if not one.messages)
    own_s = sum(one.running_s for one in spans if one.messages)
    waited_s = max(0.0, sum(one.waited_s for one in spans if not one.messages) - own_s)
    return (running_s + waited_s) / running_s if running_s > 0 else None


def _between(before: CoreTime, now: CoreTime) -> CoreTime:
    return CoreTime(now.running_s - before.running_s, now.waited_s - before.waited_s, now.messages)
