"""What Slurm's own configuration allows: how large an array may be, how long a run may take to stop."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from harness.problem import Problem
from slurm import client
from slurm.script import SPARE_S
from slurm.settings import Settings, minutes


@dataclass(frozen=True)
class Limits:
    """None where Slurm does not say. Indices are below `array_size`; a run is killed `kill_wait_s` after SIGTERM."""

    array_size: int | None
    kill_wait_s: int | None

    def problems(self, indices: Sequence[int], settings: Settings, grace_s: float) -> list[Problem]:
        """What keeps these indices of a folder, whose runs may take `grace_s` to stop, from being an array."""
        found = []
        if self.array_size is not None and max(indices) >= self.array_size:
            what = f"is point {max(indices)} of this folder, Slurm's arrays end below {self.array_size} (MaxArraySize)"
            found.append(Problem(f"index {max(indices)}", what, "out=DIR, a folder for each part of the sweep"))
        least_s = SPARE_S + grace_s
        if (minutes(settings.time) or 0) * 60 <= least_s:
            what = f"leaves no time to run: a run is told to stop {least_s:g} s before it"
            found.append(Problem(f"slurm.time {settings.time}", what, f"slurm.time={int(least_s // 60) + 2}"))
        return found

    def note(self, grace_s: float) -> str:
        """What to tell of runs that take up to `grace_s` seconds to stop; "" where Slurm gives them as long."""
        if self.kill_wait_s is None or grace_s < self.kill_wait_s:
            return ""
        return (
            f"note: launch.grace_s={grace_s:g}, but Slurm kills a run {self.kill_wait_s} s after it has asked it to "
            "end (KillWait): one whose step and checkpoint take longer loses the steps since its last checkpoint "
            "-> launch.checkpoint_every=100"
        )


def limits() -> Limits:
    """Those of this Slurm. Raises CannotRun without Slurm."""
    said = client.ask(["scontrol", "show", "config"])
    return Limits(_number("MaxArraySize", said), _number("KillWait", said))


def _number(name: str, said: str) -> int | None:
    found = re.search(rf"^{name}\s*=\s*(\d+)", said, re.MULTILINE)
    return int(found[1]) if found else None
