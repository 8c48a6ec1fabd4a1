"""`mode=tune`: which mesh of all devices, and which micro-batches, are fastest and fit. Free of torch.

    candidates   every micro-batch x mesh.tensor x mesh.pipeline x mesh.data; what the user gives stays fixed
    estimate     of each: seconds of a step and memory in closed form
    steady       of the best ones: simulated, as a run's own prediction is
    tuner        the search;  lack  what helps where nothing fits;  result  what was found;  table  how it is told

The search of Myelin's Table II (section VI): (micro-batch, G_intra, G_inter, G_data) under the memory model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig
from rich.text import Text

from harness import preparation
from harness.problem import noted
from harness.progress import Progress
from harness.tune import table
from harness.tune.line import LINES
from harness.tune.result import Tuned
from harness.tune.tuner import Tuner

OWN = (LINES,)
"""Files of a run."""


def tune(config: DictConfig, overrides: Sequence[str], folder: Path, progress: Progress) -> Tuned:
    """Find the fastest mesh that fits; leaves `tune.csv`, and the profile and the plan of the best one.

    Raises `CannotRun` where nothing fits or nothing is allowed, `ChildFailed` where profiling fails.
    """
    found = Tuner(config, overrides, folder, progress).go()
    found.draft.plan.save(folder / preparation.PLAN)
    return found


def tell(found: Tuned, folder: Path, progress: Progress) -> None:
    """What the run ends with: the candidates that were simulated, and the command of the best one."""
    for part in (table.simulated(found), Text(), *map(Text, table.told(found))):
        progress.console.print(part, soft_wrap=isinstance(part, Text))
    for note in found.notes:
        progress.note(noted(note))
    progress.note(f"layer times {found.ground.profile.source}; profile {found.ground.origin}")
    progress.note(f"candidates  {folder / LINES}")
    progress.note(f"run it: {found.command}")
