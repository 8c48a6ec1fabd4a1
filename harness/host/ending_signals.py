"""In words: which signal of the kernel has ended a process, and what follows from it. Does not import torch."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

from harness.core.units import size

SHARED_MEMORY = Path("/dev/shm")
LARGER = "make it larger (docker run --shm-size=1g)"


def explain(who: str, number: int) -> str:
    """Returns the reason of a run in which `who` ended by a signal other than SIGKILL (`oom_killer.explain_kill`).

    A process gets SIGBUS where it writes shared memory for which there is no room, and SIGXCPU, at a hard limit
    SIGKILL, where it has used its CPU time.
    """
    reason = f"{who} ended by signal {number} ({signal.Signals(number).name})"
    if number == signal.SIGXCPU:
        return f"{reason}: {limit_of(resource.getrlimit(resource.RLIMIT_CPU)[0])}"
    if number != signal.SIGBUS or not SHARED_MEMORY.exists():
        return reason
    room = os.statvfs(SHARED_MEMORY)
    free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    return f"{reason}; of {size(total)} of shared memory in {SHARED_MEMORY} {size(free)} are free -> {LARGER}"


def limit_of(cpu_s: int) -> str:
    """In words: the limit on the CPU time of a process."""
    return f"the limit on CPU time, {cpu_s} s for each process -> a larger one (ulimit -t), or fewer steps"
