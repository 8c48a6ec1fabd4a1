"""`mode=tune`: which scheme of an engine, mesh and micro-batches are fastest and fit. Free of torch.

    schemes            an engine's searched keys and planners; what the user gives stays fixed
    candidates         each scheme with meshes of all devices or fewer, and micro-batches
    bounds             the least seconds and bytes of a candidate, whatever its plan
    step_time          an analytic estimate of the seconds of a step;  peak_memory  of its memory
    extrapolate        a simulation of few micro-batches, extended to many
    candidate_search   leaves out by bounds, estimates, simulates the best ones;  parallel_search  on all cores
    infeasible         what helps if no candidate fits;  impossible  why candidates are
    outcome, result    what was found;  candidate_table  how it is printed

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
from harness.report.columns import drawn
from harness.report.progress import Progress


def tune(config: DictConfig, overrides: Sequence[str], folder: Path, progress: Progress) -> Tuned:
    """Find the fastest scheme, mesh and micro-batches that fit; leaves `tune.csv`, and the profile and the plan of the
    best one.

    Raises `CannotRun` where nothing fits or nothing is allowed, `WorkerFailed` where profiling fails. A search that is
    interrupted returns what it has found, if it has found anything.
    """
    found = Tuner(config, overrides, folder, progress).search()
    found.layout.plan.save(folder / PLAN)
    return found


def report(found: Tuned, config: DictConfig, folder: Path, progress: Progress) -> None:
    """Print the simulated candidates of one engine, the fastest first, and the command of the best one."""
    table, left_out = drawn(candidate_table.columns(found.rows), progress.console.width)
    progress.console.print(table)
    lines = [candidate_table.assumed(config, found.rows), *candidate_table.legend(found.rows)]
    lines += [f"no room for: {', '.join(left_out)}"] if left_out else []
    lines += [candidate_table.accuracy(found)]
    lines += candidate_table.summary(found.counts, found.impossible, found.left_out, found.interrupted)
    for text in lines:
        progress.console.print(Text(text), soft_wrap=True)
    for remark in found.notes:
        progress.note(note(remark))
    progress.note(f"layer times {found.ground.profile.source}; profile {found.ground.origin}")
    progress.note(f"candidates  {folder / CANDIDATES}")
    for text in candidate_table.winner(found.kinds):
        progress.note(text)
