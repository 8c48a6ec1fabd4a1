"""How long a job goes on once Slurm has asked it to end, for a higher partition or scancel: then Slurm kills it."""

from __future__ import annotations

import re

from slurm import client

LINE = re.compile(r"^KillWait\s*=\s*(\d+)", re.MULTILINE)


def note(grace_s: float) -> str:
    """What to tell of runs that take up to `grace_s` seconds to stop; "" where Slurm gives them as long."""
    found = LINE.search(client.ask(["scontrol", "show", "config"]))
    if found is None or grace_s < int(found[1]):
        return ""
    given = int(found[1])
    return (
        f"note: launch.grace_s={grace_s:g}, but Slurm kills a run {given} s after it has asked it to end (KillWait): "
        "one whose step and checkpoint take longer loses the steps since its last checkpoint "
        "-> launch.checkpoint_every=100"
    )
