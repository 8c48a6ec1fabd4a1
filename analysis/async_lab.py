"""Asynchronous pipelines compared, from the sweep `async_lab`: method x optimizer x depth, over seeds.

    python -m analysis.async_lab [FOLDER...] [--out FOLDER]        tables; with --out pictures, too

    loss |\\                     a line for each method and depth, the mean over seeds in a band with all of them:
         | \\__  ____           by updates (equal tokens), and by the time in which a pipeline of that depth makes them
         +--------- updates

Losses are measured, on one device (engine=delayed). Times are simulated: of an update of a synchronous pipeline (1F1B)
and of one that does not drain (a period for each micro-batch), on a described cluster.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from analysis import pack, records, report, run_artifacts
from analysis.paper_pages import Missing, Picture
from analysis.plots import curves as plotted
from analysis.plots import style
from analysis.records import Loaded, sweep_command
from analysis.report import MISSING, Section
from analysis.run_artifacts import MissingData
from harness.core.problem import CannotRun
from harness.core.record import RunRecord
from harness.core.staleness import Corrections, copies
from harness.core.units import seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SWEEPS = ("async_lab-local", "async_lab_pipelines")
"""Folders in runs/: the runs that train, and the simulated pipelines."""
LAST = 100
"""Updates at the end over which a loss is averaged; and a curve's points, each over this many before it."""
SIMULATED = "gpt"
"""What the simulated pipelines are of."""
DIVERGED = "Diverged"
"""The error of a run whose loss is no number."""
COLUMNS = ("optimizer", "method", "stages", "weights", "loss", "spread", "over flush", "at equal time", "diverged")
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
        return sum(not _mean(one[-LAST:]) < one[0] for one in self.losses)

    def last(self, updates: int | None = None) -> list[float]:
        """The loss of each run after so many updates, or after all: a mean over the last ones. Infinite where it has
        diverged."""
        found = [_mean(one[:updates][-LAST:]) for one in self.losses]
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
        if record.source != "simulated" or record.status != "ok":
            continue
        metrics, batch, stages = record.metrics, record.config["batch"], record.config["mesh"]["pipeline"]
        periodic = record.config["engine"]["name"] == "periodic"
        every = record.config["engine"]["update_every"] if periodic else batch["micro_batches"]
        update_s = metrics["period_s"] * every if periodic else metrics["step_time_s"]
        peak = max(metrics["peak_memory_bytes"])
        busy = _busy_s(record) / update_s
        found["periodic" if periodic else "1f1b"][stages] = Pipeline(stages, update_s, busy, peak)
    return found


def _busy_s(record: RunRecord) -> float:
    """Seconds that a device computes for an update, on average."""
    steps = record.metrics["utilization"]
    batch, engine = record.config["batch"], record.config["engine"]
    share = (engine.get("update_every") or batch["micro_batches"]) / batch["micro_batches"]
    return statistics.fmean(steps) * record.metrics["step_time_s"] * share


def copies_of(record: RunRecord) -> float:
    """Copies of a stage's weights in the pipeline that a run stands for, on average over its stages."""
    engine = record.config["engine"]
    stages, corrections = engine["stages"], engine["corrections"]
    flights = engine.get("in_flight") or range(stages, 0, -1)
    own, every = Corrections(**corrections), engine.get("update_every") or 1
    kept = [copies(engine["versions"], count, every, own) for count in flights]
    return statistics.fmean(kept) + own.keeps_update


def _scheme(record: RunRecord) -> Scheme:
    engine, optimizer = record.config["engine"], record.config["optimizer"]
    corrections, versions = engine["corrections"], engine["versions"]
    parts = [versions]
    parts += ["prediction"] if corrections["prediction"] else []
    parts += ["error feedback"] if corrections["error_feedback"] else []
    parts += ["lr by delay"] if corrections["lr_steps"] else []
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


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def updates_at_equal_time(scheme: Scheme, count: int, times: Times, stages: int) -> int:
    """Updates that a scheme makes on so many stages while a pipeline that does not drain makes `count`."""
    if not scheme.synchronous:
        return count
    return math.floor(count * times["periodic"][stages].update_s / times["1f1b"][stages].update_s)


def sections(loaded: Loaded) -> list[Section]:
    """A table for each model, and one of the pipelines."""
    runs, times = trained(loaded.records), pipelines(loaded.records)
    models = list(dict.fromkeys(one.scheme.model for one in runs))
    found = [_section(model, [one for one in runs if one.scheme.model == model], _of(model, times)) for model in models]
    return [*found, *_pipelines(times)]


def _of(model: str, times: Times) -> Times:
    """The pipelines that stand for a model: those of a GPT for no other one."""
    return times if model.startswith(SIMULATED) else {kind: {} for kind in times}


def _section(model: str, runs: Sequence[Trained], times: Times) -> Section:
    synchronous = {one.scheme.optimizer: one for one in runs if one.scheme.synchronous}
    depths = sorted({one.scheme.stages for one in runs if one.scheme.stages})
    rows = []
    for one in runs:
        base = synchronous.get(one.scheme.optimizer)
        alone = one.scheme.synchronous
        rows.append(_row(one, base, MISSING if alone else _text(_mean(one.last()))))
        for depth in [one for one in depths if alone and one in times["periodic"] and one in times["1f1b"]]:
            count = updates_at_equal_time(one.scheme, len(one.losses[0]), times, depth)
            name = f"{one.scheme.method}, {count} updates"
            rows.append((one.scheme.optimizer, name, str(depth), "", "", "", "", _text(_mean(one.last(count))), ""))
    counts = {len(losses) for one in runs for losses in one.losses}
    seeds = {len(one.losses) for one in runs}
    notes = (
        f"Loss: mean over {_range(seeds)} seeds of the last {LAST} of {_range(counts)} updates, on one device. Over "
        "flush: how much more than synchronous training with the same optimizer. Weights: copies in a stage, on "
        "average.",
        "At equal time: the loss when the simulated pipeline of so many stages that does not drain has made its "
        "updates; a synchronous one (flush) has made fewer by then.",
    )
    return Section(f"{model}: loss at equal tokens and at equal time", COLUMNS, tuple(rows), notes, texts=2)


def _row(one: Trained, base: Trained | None, at_equal_time: str) -> tuple[str, ...]:
    losses, scheme = one.last(), one.scheme
    spread = max(losses) - min(losses) if len(losses) > 1 and math.isfinite(max(losses)) else math.nan
    more = _mean(losses) - _mean(base.last()) if base and base is not one else math.nan
    return (
        scheme.optimizer,
        scheme.method,
        str(scheme.stages) if scheme.stages else "any",
        f"{one.copies:.3g}",
        _text(_mean(losses)),
        _text(spread),
        f"{more:+.3f}" if math.isfinite(more) else MISSING,
        at_equal_time,
        f"{one.diverged} of {len(losses)}",
    )


def _text(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else MISSING


def _range(numbers: Iterable[int]) -> str:
    found = sorted(set(numbers))
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"


def _pipelines(times: Times) -> list[Section]:
    """Seconds of an update, and what devices do in it; empty if nothing was simulated."""
    columns = ("pipeline", "stages", "an update", "over 1F1B", "utilization", "fullest device")
    names = {"1f1b": "1F1B, drains before an update", "periodic": "does not drain"}
    rows = [
        (
            names[kind],
            str(stages),
            seconds(one.update_s),
            f"{times['1f1b'][stages].update_s / one.update_s:.2f} x" if stages in times["1f1b"] else MISSING,
            f"{100 * one.utilization:.0f} %",
            f"{one.peak_bytes / 2**30:.1f} GiB",
        )
        for kind, of_kind in times.items()
        for stages, one in sorted(of_kind.items())
    ]
    note = "Simulated: an update of 32 samples of a GPT of 28 layers, 4,096 wide, on A100 of cluster=dgx_a100_80."
    return [Section("The pipelines", columns, tuple(rows), (note,))] if rows else []


def figures(loaded: Loaded) -> dict[str, Figure]:
    """Curves of each model, by updates and by simulated time; and losses by depth."""
    runs, times = trained(loaded.records), pipelines(loaded.records)
    found = {}
    for model in dict.fromkeys(one.scheme.model for one in runs):
        own = [one for one in runs if one.scheme.model == model]
        found[f"{model}_curves"] = curves(own, _of(model, times))
        found[f"{model}_depth"] = depths(own)
    return found


@style.styled
def curves(runs: Sequence[Trained], times: Times) -> Figure:
    """The deepest pipeline of each method, by updates and by time."""
    deepest = max((one.scheme.stages for one in runs), default=0)
    shown = [one for one in runs if one.scheme.stages in (0, deepest)]
    several = deepest in times["1f1b"] and deepest in times["periodic"]
    drawn, axes = style.panels(1, 1 + several, 13, 6.5, sharey=True)
    looks = plotted.looks(len(shown))
    for one, look in zip(shown, looks, strict=True):
        _draw(axes[0, 0], one, look, 1.0)
        if several:
            kind = "1f1b" if one.scheme.synchronous else "periodic"
            _draw(axes[0, 1], one, look, times[kind][deepest].update_s)
    axes[0, 0].set(xlabel="updates", ylabel="loss")
    if several:
        last_s = max(len(one.losses[0]) for one in shown) * times["periodic"][deepest].update_s
        axes[0, 1].set(xlabel="simulated seconds", xlim=(0, last_s))
    labels = [f"{one.scheme.optimizer}, {one.scheme.method}" for one in shown]
    style.title(drawn, f"{runs[0].scheme.model}: {deepest} stages, means over seeds in a band with all of them")
    handles = [style.lined(text, look.colour, _DASHES[look.dash]) for text, look in zip(labels, looks, strict=True)]
    style.below(drawn, handles, grow=True)
    return drawn


_DASHES: dict[str, style.Dash] = {"solid": "-", "dashed": "--", "dotted": ":", "dash-dotted": "--"}


def _draw(axes: Axes, one: Trained, look: plotted.Look, update_s: float) -> None:
    """Means over the last updates, of each seed."""
    count = max(map(len, one.losses))
    places = range(min(LAST // 4, count), count + 1, max(1, count // 100))
    means = [
        [_mean(own[max(0, place - LAST // 2) : place]) for own in one.losses if place <= len(own)] for place in places
    ]
    x = [place * update_s for place in places]
    axes.plot(x, [_mean(point) for point in means], color=look.colour, linestyle=_DASHES[look.dash])
    axes.fill_between(x, [min(p) for p in means], [max(p) for p in means], color=look.colour, alpha=0.2, linewidth=0)


@style.styled
def depths(runs: Sequence[Trained]) -> Figure:
    """The loss after all updates against the number of stages, a line for each optimizer and method."""
    drawn, axes = style.panels(1, 1, 9, 5.5)
    lines: dict[str, dict[int, list[float]]] = defaultdict(dict)
    for one in runs:
        lines[f"{one.scheme.optimizer}, {one.scheme.method}"][one.scheme.stages] = one.last()
    stages = sorted({one.scheme.stages for one in runs if one.scheme.stages})
    for (label, of_depth), look in zip(lines.items(), plotted.looks(len(lines)), strict=True):
        points = dict.fromkeys(stages, of_depth[0]) if 0 in of_depth else dict(sorted(of_depth.items()))
        means = [_mean(point) for point in points.values()]
        axes[0, 0].plot([*points], means, color=look.colour, linestyle=_DASHES[look.dash], marker="o", label=label)
    axes[0, 0].set_xscale("log", base=2)
    axes[0, 0].set_xticks(stages, list(map(str, stages)))
    axes[0, 0].set(xlabel="stages", ylabel="loss after all updates", title=runs[0].scheme.model)
    axes[0, 0].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return drawn


def load(folders: Sequence[Path] = ()) -> Loaded:
    """The records of the sweep in these folders; by default the committed ones, and those in runs/."""
    here = [folder for name in SWEEPS if (folder := pack.RUNS / name).is_dir()]
    return records.load(folders or [*pack.archives_of_sweeps(SWEEPS), *here])


def newest(loaded: Loaded) -> Loaded:
    """One record of each point."""
    found = tuple(records.newest(loaded.records, records.point_of).values())
    return Loaded(found, loaded.counts, loaded.skipped)


def picture(name: str) -> Picture | Missing:
    """One of `figures`, as notebooks show it."""
    found = figures(newest(load()))
    return Picture.of(found[name]) if name in found else Missing(SWEEPS[0], f"Not run yet: {sweep_command(SWEEPS[0])}")


def main(arguments: Sequence[str]) -> int:
    """Returns 2 where there are no records, else 0."""
    parser = argparse.ArgumentParser("python -m analysis.async_lab", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="of a sweep; by default runs/async_lab")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write pictures into it")
    options = parser.parse_args(arguments)
    try:
        loaded = newest(load(options.folders))
    except CannotRun as error:
        print(error, file=sys.stderr)
        return 2
    found = sections(loaded)
    if not found:
        print(f"no runs of engine=delayed   -> {sweep_command(SWEEPS[0])}", file=sys.stderr)
        return 2
    report.show(found, Console(width=140, highlight=False))
    print("\n".join(loaded.messages()))
    for name, figure in figures(loaded).items() if options.out else ():
        options.out.mkdir(parents=True, exist_ok=True)
        style.write(figure, options.out / f"{name}.png")
        print(options.out / f"{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
