"""Limits of Slurm's configuration: how large an array may be, how long a run may take to stop."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from harness.core.problem import Problem, note
from slurm import commands
from slurm.script import SPARE_S
from slurm.settings import Settings, minutes


@dataclass(frozen=True)
class Limits:
    """None where Slurm does not say. Indices are below `array_size`; a run is killed `kill_wait_s` after SIGTERM."""

    array_size: int | None
    kill_wait_s: int | None

    def problems(self, indices: Sequence[int], settings: Settings, grace_s: float) -> list[Problem]:
        """Return the problems of submitting these indices as an array; a run may take `grace_s` to stop."""
        found = []
        if self.array_size is not None and max(indices) >= self.array_size:
            message = f"of a point is too large, Slurm's arrays end below {self.array_size} (MaxArraySize)"
            found.append(Problem("index", max(indices), message, hint="out=DIR, a folder for each part of the sweep"))
        least_s = SPARE_S + grace_s
        if (minutes(settings.time) or 0) * 60 <= least_s:
            message = f"leaves no time to run: a run gets the signal to stop {least_s:g} s before it"
            fix = {"slurm.time": int(least_s // 60) + 2}
            found.append(Problem("slurm.time", settings.time, message, (fix,)))
        return found

    def note(self, grace_s: float) -> str:
        """A warning about runs that take up to `grace_s` seconds to stop; "" where Slurm gives them as long."""
        if self.kill_wait_s is None or grace_s < self.kill_wait_s:
            return ""
        message = (
            f"is too long, Slurm kills a run {self.kill_wait_s} s after the signal to stop (KillWait): a run whose "
            "step and checkpoint take longer loses the steps since its last checkpoint"
        )
        return note(Problem("launch.grace_s", grace_s, message, ({"launch.checkpoint_every": 100},)))


def limits() -> Limits:
    """Return the limits of this Slurm. Raises CannotRun without Slurm."""
    output = commands.ask(["scontrol", "show", "config"])
    return Limits(_number("MaxArraySize", output), _number("KillWait", output))


def _number(name: str, output: str) -> int | None:
    match = re.search(rf"^{name}\s*=\s*(\d+)", output, re.MULTILINE)
    return int(match[1]) if match else None
