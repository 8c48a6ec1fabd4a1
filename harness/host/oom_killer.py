"""Attributes a SIGKILL to the kernel's OOM killer, and reads the memory limit. Does not import torch."""

from __future__ import annotations

import re
import resource
from contextlib import suppress
from pathlib import Path

from harness.core.record import Status
from harness.core.units import size
from harness.host import devices, ending_signals

VMSTAT = Path("/proc/vmstat")
MEMINFO = Path("/proc/meminfo")


def kill_count() -> int | None:
    """Returns the kernel's oom_kill counter, of this machine or of this control group; None if it cannot be read.

    A control group counts its descendants, too. The ranks of a Slurm job are in other groups than their parent, so the
    counter of the whole machine is preferred.
    """
    with suppress(OSError):
        if match := re.search(r"^oom_kill (\d+)$", VMSTAT.read_text(), re.MULTILINE):
            return int(match[1])
    counts = (group.oom_kills() for group in devices.control_groups())
    return next((count for count in counts if count is not None), None)


def was_oom_kill(before: int | None) -> bool:
    """Returns whether a SIGKILL can be blamed on the kernel's OOM killer.

    `before` is the counter at the start. If the counter cannot be read, the answer is True.
    """
    now = kill_count()
    return before is None or now is None or now > before


def explain_kill(who: str, before: int | None) -> tuple[Status, str]:
    """Returns the status and reason of a run in which `who` ended by signal 9; see `was_oom_kill`."""
    if not was_oom_kill(before):
        cpu_s = resource.getrlimit(resource.RLIMIT_CPU)[1]
        unlimited = cpu_s == resource.RLIM_INFINITY
        by = (
            "by hand, or by a program"
            if unlimited
            else f"by hand, by a program, or by {ending_signals.limit_of(cpu_s)}"
        )
        return "error", f"{who} was killed (signal 9), not by the kernel's OOM killer: {by}"
    held = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    limit = limit_bytes()
    sizes = f"the largest process held {size(held)}" + (f" of {size(limit)}" if limit else "")
    likely = "most likely " if before is None else ""
    return "oom", f"{who} was killed (signal 9), {likely}by the kernel's OOM killer (out of memory): {sizes}"


def limit_bytes() -> int | None:
    """Returns the bytes that all processes of its control groups may use, at most the machine's memory."""
    limits = [limit for group in devices.control_groups() if (limit := group.limit_bytes()) is not None]
    with suppress(OSError):
        if match := re.search(r"^MemTotal:\s*(\d+) kB$", MEMINFO.read_text(), re.MULTILINE):
            limits.append(int(match[1]) * 1024)
    return min(limits, default=None)
