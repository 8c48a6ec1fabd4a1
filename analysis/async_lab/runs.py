"""The runs of the sweeps `async_lab` and `async_lab_pipelines`: what was trained how, and the simulated pipelines.

Losses are measured, on one device (engine=delayed). Times are simulated: of an update of a synchronous pipeline (1F1B)
and of one that does not drain (a period for each micro-batch), on a described cluster.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from analysis import pack, records, run_artifacts
from analysis.records import Loaded
from analysis.run_artifacts import MissingData
from harness.core.record import RunRecord
from harness.core.staleness import Corrections, copies

SWEEPS = ("async_lab-local", "async_lab_pipelines")
"""Folders in runs/: the runs that train, and the simulated pipelines."""
LAST = 100
"""Updates at the end over which a loss is averaged; a point of a curve is over the half of it."""
SIMULATED = "gpt"
"""What the simulated pipelines are of."""
DIVERGED = "Diverged"
"""The error of a run whose loss is no number."""
SYNCHRONOUS = "flush"


@dataclass(frozen=True)
class Scheme:
    """What was trained how. `stages` is 0 where losses do not depend on the depth; `optimizer` has its numbers."""

    model: str
    optimizer: str
    method: str
    stages: int

    @property
    def synchronous(self) -> bool:
        return self.method == SYNCHRONOUS


@dataclass(frozen=True)
class Trained:
    """The losses of each update, for each seed. `copies` are those of the weights, of a stage on average."""

    scheme: Scheme
    copies: float
    losses: tuple[tuple[float, ...], ...]

    @property
    def diverged(self) -> int:
        """Runs whose loss is no number, or larger than in the beginning."""
        return sum(not mean(one[-LAST:]) < one[0] for one in self.losses)

    def last(self, updates: int | None = None) -> list[float]:
        """The loss of each run after so many updates, or after all: a mean over the last ones. Infinite where it has
        diverged."""
        found = [mean(one[:updates][-LAST:]) for one in self.losses]
        return [one if math.isfinite(one) else math.inf for one in found]


@dataclass(frozen=True)
class Pipeline:
    """A pipeline of so many stages, simulated: the time of an update of as many samples, and how busy its devices
    are."""

    stages: int
    update_s: float
    utilization: float
    peak_bytes: int


Times = Mapping[str, Mapping[int, Pipeline]]
"""{"1f1b" or "periodic": {stages: the pipeline}}."""


def trained(loaded: Sequence[RunRecord]) -> list[Trained]:
    """The schemes that were trained, each with the runs of all its seeds."""
    groups: dict[Scheme, list[RunRecord]] = defaultdict(list)
    for record in loaded:
        if record.source != "simulated" and record.config.get("engine", {}).get("name") == "delayed":
            groups[_scheme(record)].append(record)
    return [
        Trained(scheme, copies_of(runs[0]), tuple(found))
        for scheme, runs in sorted(groups.items(), key=lambda one: _order(one[0]))
        if (found := [own for run in runs if (own := _losses(run))])
    ]


def pipelines(loaded: Sequence[RunRecord]) -> dict[str, dict[int, Pipeline]]:
    """{"1f1b": {stages: ...}, "periodic": {stages: ...}} of the simulated points, for one batch of the same size."""
    found: dict[str, dict[int, Pipeline]] = {"1f1b": {}, "periodic": {}}
    for record in loaded:
        if record.status != "ok" or record.config["mode"] != "simulate":
            continue
        metrics, batch, stages = record.metrics, record.config["batch"], record.config["mesh"]["pipeline"]
        periodic = record.config["engine"]["name"] == "periodic"
        every = record.config["engine"]["update_every"] if periodic else batch["micro_batches"]
        update_s = metrics["period_s"] * every if periodic else metrics["step_time_s"]
        peak = max(metrics["peak_memory_bytes"])
        busy_s = statistics.fmean(metrics["utilization"]) * metrics["step_time_s"] * every / batch["micro_batches"]
        found["periodic" if periodic else "1f1b"][stages] = Pipeline(stages, update_s, busy_s / update_s, peak)
    return found


def copies_of(record: RunRecord) -> float:
    """Copies of a stage's weights in the pipeline that a run stands for, on average over its stages."""
    engine = record.config["engine"]
    stages, corrections = engine["stages"], engine["corrections"]
    flights = engine.get("in_flight") or range(stages, 0, -1)
    own, every = Corrections(**corrections), engine.get("update_every") or 1
    kept = [copies(engine["versions"], count, every, own) for count in flights]
    return statistics.fmean(kept) + own.kept


def _scheme(record: RunRecord) -> Scheme:
    engine, optimizer = record.config["engine"], record.config["optimizer"]
    corrections, versions = engine["corrections"], engine["versions"]
    parts = [versions]
    way = " of the whole way" if corrections.get("round_trip") else ""
    parts += [f"prediction{way}"] if corrections["prediction"] else []
    parts += ["error feedback"] if corrections["error_feedback"] else []
    parts += [f"look-ahead {ahead:g}"] if (ahead := corrections.get("look_ahead")) else []
    parts += ["lr by delay"] if corrections["lr_steps"] else []
    parts += [f"discrepancy {base:g}"] if (base := corrections.get("discrepancy")) else []
    planner = record.config["planner"]["name"]
    parts += [f"stages by planner={planner}"] if engine["stages"] > 1 and planner != "uniform" else []
    name = optimizer["name"] + (f" {optimizer['beta1']:g}" if optimizer.get("beta1") else "")
    name += f" {optimizer['momentum']:g}" if optimizer.get("momentum") else ""
    name += " nesterov" if optimizer.get("nesterov") else ""
    name += f", lr {optimizer['lr']:g}"
    depth = engine["stages"] if versions in ("stash", "none") else 0
    return Scheme(record.config["model"]["name"], name, " + ".join(parts), depth)


def _order(scheme: Scheme) -> tuple[str, str, bool, str, int]:
    return scheme.model, scheme.optimizer, not scheme.synchronous, scheme.method, scheme.stages


def _losses(record: RunRecord) -> tuple[float, ...]:
    """The loss of each update; of a run that has diverged, and so ended, the last one is no number."""
    diverged = (math.nan,) if record.status == "error" and DIVERGED in record.reason else ()
    try:
        return (*run_artifacts.losses(record), *diverged)
    except MissingData:
        return diverged


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def updates_at_equal_time(scheme: Scheme, count: int, times: Times, stages: int) -> int:
    """Updates that a scheme makes on so many stages while a pipeline that does not drain makes `count`."""
    if not scheme.synchronous:
        return count
    return math.floor(count * times["periodic"][stages].update_s / times["1f1b"][stages].update_s)


def load(folders: Sequence[Path] = ()) -> Loaded:
    """The records of the sweep in these folders; by default the committed ones, and those in runs/."""
    here = [folder for name in SWEEPS if (folder := pack.RUNS / name).is_dir()]
    return records.load(folders or [*pack.archives_of_sweeps(SWEEPS), *here])


def newest(loaded: Loaded) -> Loaded:
    """One record of each point."""
    found = tuple(records.newest(loaded.records, records.point_of).values())
    return Loaded(found, loaded.counts, loaded.skipped)
