"""Whether the kernel ends processes for want of memory, and how much there was. Free of torch."""

from __future__ import annotations

import re
import resource
from contextlib import suppress
from pathlib import Path

from harness import devices
from harness.display import size
from harness.record import Status

VMSTAT = Path("/proc/vmstat")
MEMINFO = Path("/proc/meminfo")


def kills() -> int | None:
    """How many processes the kernel has ended so far, on this machine or in this control group; None: it does not say.

    A control group counts what is below it, too; the ranks of a Slurm job are in groups beside that of their parent, so
    that the whole machine's count is the one to look at where it can be read.
    """
    for path in (VMSTAT, *(group / "memory.events" for group in devices.control_groups())):
        with suppress(OSError):
            if match := re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE):
                return int(match[1])
    return None


def killed(before: int | None) -> bool:
    """Whether an end by signal 9 was the kernel's, which had ended `before` processes before; it may not say: true."""
    now = kills()
    return before is None or now is None or now > before


def verdict(who: str, before: int | None) -> tuple[Status, str]:
    """What to tell of the end of `who` by signal 9; see `killed`."""
    if not killed(before):
        return "error", f"{who} was killed (signal 9), not by the kernel for want of memory: by hand, or by a program"
    held = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    limit = limit_bytes()
    sizes = f"the largest process held {size(held)}" + (f" of {size(limit)}" if limit else "")
    likely = "most likely " if before is None else ""
    return "oom", f"{who} was killed (signal 9), {likely}by the kernel for want of memory: {sizes}"


def limit_bytes() -> int | None:
    """What this process and all others of its control groups may have together, at most the machine's memory."""
    limits = []
    for group in devices.control_groups():
        with suppress(OSError, ValueError):
            limits.append(int((group / "memory.max").read_text()))
    with suppress(OSError):
        if match := re.search(r"^MemTotal:\s*(\d+) kB$", MEMINFO.read_text(), re.MULTILINE):
            limits.append(int(match[1]) * 1024)
    return min(limits, default=None)
