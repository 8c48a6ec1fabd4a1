"""`mode=tune`: which mesh of all devices, and which micro-batches, are fastest and fit. Free of torch.

    candidates         every micro-batch x mesh.tensor x mesh.pipeline x mesh.data; what the user gives stays fixed
    step_time          an analytic estimate of the seconds of a step;  peak_memory  of its memory
    extrapolate        a simulation of few micro-batches, extended to many
    candidate_search   estimates all candidates, simulates the best ones
    infeasible         what helps if no candidate fits;  impossible  why candidates are
    result             what was found;  candidate_table  how it is printed

The search of Myelin's Table II (section VI): (micro-batch, G_intra, G_inter, G_data) under the memory model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig
from rich.text import Text

from harness.core.problem import note
from harness.core.run_files import CANDIDATES, PLAN
from harness.planning.tune import candidate_table
from harness.planning.tune.candidate_search import Tuner
from harness.planning.tune.result import Tuned
from harness.report.progress import Progress


def tune(config: DictConfig, overrides: Sequence[str], folder: Path, progress: Progress) -> Tuned:
    """Find the fastest mesh that fits; leaves `tune.csv`, and the profile and the plan of the best one.

    Raises `CannotRun` where nothing fits or nothing is allowed, `WorkerFailed` where profiling fails.
    """
    found = Tuner(config, overrides, folder, progress).search()
    found.draft.plan.save(folder / PLAN)
    return found


def report(found: Tuned, folder: Path, progress: Progress) -> None:
    """Print the simulated candidates and the command of the best one."""
    for part in (candidate_table.simulated(found), Text(), *map(Text, candidate_table.reported(found))):
        progress.console.print(part, soft_wrap=isinstance(part, Text))
    for remark in found.notes:
        progress.note(note(remark))
    progress.note(f"layer times {found.ground.profile.source}; profile {found.ground.origin}")
    progress.note(f"candidates  {folder / CANDIDATES}")
    progress.note(f"run it: {found.command}")
