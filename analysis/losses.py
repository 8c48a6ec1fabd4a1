"""Loss curves of several runs in one picture, and how far they are apart:

    python -m analysis.losses RUN_DIR [RUN_DIR ...] --out FILE.png [--titles "A,B"] [--level "unigram entropy=3.26"]

    model=unet, batch.size=16        what all runs have in common
    loss        |\\___  - - - - - -   a line for each run, the first one wide and grey; a level is dashed
                |    \\_________      where lines lie on one another, each has pieces in turn
    relative    |  _____-----~~~     of each other run to the first one, |a - b| / max(|a|, |b|), logarithmic
    difference  +---------------- step
                - engine=single  - engine=gpipe

A sweep's folder means all its points, in the order in which they started. With --over-seeds the runs that differ only
in their seed are one line, their mean, in a band with all of them. Steps count from 0, warm-up included; what only
some runs have is not compared. A run without losses, such as an infeasible one, is skipped and named; several of a
sweep in one line. An infeasible point that a later sweep in the folder does not have is left out silently.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis import run_artifacts, run_folders
from analysis.plots import curves as plotted
from analysis.plots import style
from analysis.run_folders import NoRun, Run, common, listed, load, titled
from harness.core import problem
from harness.core.run_files import METRICS

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIRST = "#BBBBBB"
"""Grey, for the run that the others are held against; the others have the palette of all pictures."""
_SIZE_IN = (12.0, 7.0)
_FIRST_PT = 7.0
"""Width of the first run's line, on which the others are where they are equal to it."""
IN_COMMON = ("batch.size", "batch.micro_batches", "precision")
"""Keys that the picture's title has if all runs agree in them."""


EARLIER = " of an earlier sweep"


@dataclass(frozen=True)
class Curve:
    """A run's loss in each step; the `note` says of a run that has not ended what became of it."""

    title: str
    losses: tuple[float, ...]
    note: str = ""
    band: tuple[tuple[float, float], ...] = ()
    """The least and the largest loss of each step, where it is the mean of several runs."""

    def differences(self, first: Curve) -> list[float]:
        """Relative, in each step that both have: |a - b| / max(|a|, |b|), and 0 where both are 0."""
        pairs = zip(self.losses, first.losses, strict=False)
        return [abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0 for a, b in pairs]


def main(arguments: Sequence[str]) -> int:
    """Returns 0, or 2 where nothing could be drawn; says why on stderr."""
    parser = argparse.ArgumentParser("python -m analysis.losses", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE.png")
    parser.add_argument("--titles", type=listed, metavar='"A,B"', help="one for each run, in place of what differs")
    parser.add_argument(
        "--level",
        type=_level,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        dest="levels",
        help="a horizontal line; may be given several times",
    )
    parser.add_argument(
        "--over-seeds",
        action="store_true",
        help="a line for the mean of the runs that differ only in their seed, with their range",
    )
    options = parser.parse_args(arguments)
    try:
        all_curves, skipped, agreed = curves(options.folders, options.titles, options.over_seeds)
        draw(all_curves, options.out, options.levels, agreed)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    for line in skipped:
        print(f"skipped {line}", file=sys.stderr)
    for curve in all_curves:
        if curve.note:
            print(curve.note, file=sys.stderr)
    if agreed:
        print(f"all runs: {agreed}" if len(all_curves) > 1 else agreed)
    print("\n".join([*report(all_curves), f"{options.out}: {len(all_curves)} runs"]))
    return 0


def curves(
    folders: Sequence[Path], titles: Sequence[str] | None = None, over_seeds: bool = False
) -> tuple[list[Curve], list[str], str]:
    """The curves of all runs with losses, a line for each run without, and what all of the curves' runs agree in.

    `titles` are those of the curves, in order; else these have only what differs. With `over_seeds` runs that differ
    only in their seed are one curve.

    Raises ValueError with a line for each folder without runs, where no run has losses, and where `titles` are not as
    many as the curves.
    """
    runs, losses, skipped, missing = [], [], [], []
    for folder in folders:
        try:
            of_folder = load(folder)
        except NoRun as error:
            missing.append(str(error))
            continue
        without = []
        for run in of_folder:
            try:
                losses.append(run_artifacts.step_losses(run.folder / METRICS))
                runs.append(run)
            except run_artifacts.MissingData as error:
                without.append((run, error))
        skipped += _skipped(folder, without)
    if missing or not runs:
        raise ValueError("\n".join([*skipped, *missing]))
    groups = _groups(runs, losses) if over_seeds else [(run, [own]) for run, own in zip(runs, losses, strict=True)]
    firsts, shared = [run for run, _ in groups], common(runs)
    parts = zip(titled(firsts, titles, shared), groups, strict=True)
    found = [_curve(title, own, _note(run)) for title, (run, own) in parts]
    return found, skipped, " ".join([*shared, *_agreed(runs)])


def _groups(runs: Sequence[Run], losses: Sequence[tuple[float, ...]]) -> list[tuple[Run, list[tuple[float, ...]]]]:
    """The first of the runs that differ only in their seed, and the losses of all of them."""
    keys = [key for key in run_folders.differing(runs) if key != "seed"]
    found: dict[str, tuple[Run, list[tuple[float, ...]]]] = {}
    for run, own in zip(runs, losses, strict=True):
        found.setdefault(str([run.title, *(run.values.get(key) for key in keys)]), (run, []))[1].append(own)
    return [*found.values()]


def _curve(title: str, losses: Sequence[tuple[float, ...]], note: str) -> Curve:
    """The curve of one run, or the mean of several: of the steps that all have."""
    if len(losses) == 1:
        return Curve(title, losses[0], note)
    steps = [*zip(*losses, strict=False)]
    means = tuple(math.fsum(step) / len(step) for step in steps)
    return Curve(f"{title} (mean of {len(losses)})", means, note, tuple((min(step), max(step)) for step in steps))


def _agreed(runs: Sequence[Run]) -> list[str]:
    """["batch.size=16", "precision=fp32"], of the keys in which all runs agree."""
    found = {key: {run.values.get(key) for run in runs} for key in IN_COMMON}
    return [f"{key}={value}" for key, values in found.items() if len(values) == 1 for value in values - {None}]


def _note(run: Run) -> str:
    """Of a run without an end: that its curve may grow, or that it is lost."""
    record = run.record
    if record.status not in ("running", "lost", "unknown"):
        return ""
    return f"{run.folder}   is {record.status}" + (f": {record.reason}" if record.reason else "")


def _skipped(folder: Path, without: Sequence[tuple[Run, run_artifacts.MissingData]]) -> list[str]:
    """A line for each run whose file is missing or damaged; of several that did not train one line in all. None for
    infeasible points of an earlier sweep: nothing became of them."""
    newest = run_folders.newest_points(folder)
    without = [one for one in without if _state(one[0], newest) != f"infeasible{EARLIER}"]
    untrained = [run for run, _ in without if _untrained(run)]
    if len(untrained) < 2:
        return [_without(run, error) for run, error in without]
    states = [_state(run, newest) for run in untrained]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    summary = f"{len(untrained)} points of {folder} without losses: {counts}   -> python -m slurm.status {folder}"
    return [*(_without(run, error) for run, error in without if not _untrained(run)), summary]


def _untrained(run: Run) -> bool:
    return run.record.status != "ok" or run.record.source != "measured"


def _state(run: Run, newest: Set[str] | None) -> str:
    """infeasible, simulated, oom of an earlier sweep"""
    state = run.record.status if run.record.status != "ok" else run.record.source
    return state if newest is None or run.folder.name in newest else f"{state}{EARLIER}"


def _without(run: Run, error: run_artifacts.MissingData) -> str:
    """Why a run has no losses: how it ended, or what is wrong with its file."""
    record = run.record
    if record.status == "ok":
        return str(error)
    why = problem.line(record.problems[0]) if record.problems else next(iter(record.reason.strip().splitlines()), "")
    return f"{run.folder}   ended as {record.status}" + (f": {why}" if why else "")


def report(curves: Sequence[Curve]) -> list[str]:
    """A line for each run: steps, first and last loss, and its largest relative difference from the first run."""
    width = max(len(curve.title) for curve in curves)
    lines = [f"{'run':{width}}  steps  first loss   last loss  largest relative difference from the first run"]
    for number, curve in enumerate(curves):
        lines.append(f"{curve.title:{width}}  {len(curve.losses):5}  {curve.losses[0]:10.6f}  {curve.losses[-1]:10.6f}")
        if number:
            differences = curve.differences(curves[0])
            largest = max(differences)
            lines[-1] += f"  {largest:.2e} at step {differences.index(largest)}" if largest else "  none"
    return lines


def draw(curves: Sequence[Curve], path: Path, levels: Sequence[tuple[str, float]] = (), title: str = "") -> None:
    """Write the picture to `path` as a PNG, 1200 pixels wide, 700 high and more for a legend of several lines."""
    style.write(figure(curves, levels, title), path)


@style.styled
def figure(curves: Sequence[Curve], levels: Sequence[tuple[str, float]] = (), title: str = "") -> Figure:
    """Losses above; below, where there are several runs, their differences from the first one. A single run's own title
    is the picture's, before `title`."""
    several = len(curves) > 1
    drawn, axes = style.panels(1 + several, 1, *_SIZE_IN, sharex=True, height_ratios=(2, 1)[: 1 + several])
    looks = plotted.looks(len(curves) - 1) if several else [plotted.Look(style.BLUE)]
    _draw_losses(axes[0, 0], curves, looks)
    _draw_levels(axes[0, 0], levels)
    style.title(drawn, title if several else f"{curves[0].title} {title}".strip())
    if several:
        _draw_differences(axes[1, 0], curves, looks)
        style.below(drawn, _handles(curves, looks), grow=True)
    axes[-1, 0].set_xlabel("step")
    axes[-1, 0].xaxis.get_major_locator().set_params(integer=True)
    return drawn


def _draw_losses(axes: Axes, curves: Sequence[Curve], looks: Sequence[plotted.Look]) -> None:
    everyone, several = curves, len(curves) > 1
    if several:
        first, *curves = curves
        axes.plot(first.losses, **_first(first.losses))
    lines = [_line(curve.losses, look) for curve, look in zip(curves, looks, strict=True)]
    plotted.overlay(axes, lines)
    colours = [*([FIRST] if several else []), *(look.colour for look in looks)]
    for curve, colour in zip(everyone, colours, strict=True):
        if curve.band:
            low, high = zip(*curve.band, strict=True)
            axes.fill_between(range(len(low)), low, high, color=colour, alpha=0.25, linewidth=0)
    axes.set_ylabel("loss")
    axes.margins(x=0.01)


def _draw_levels(axes: Axes, levels: Sequence[tuple[str, float]]) -> None:
    for name, value in levels:
        axes.axhline(value, color="black", linewidth=1.2, linestyle="--")
        axes.annotate(
            f"{name} {value:g}",
            (1, value),
            (-4, 4),
            xycoords=axes.get_yaxis_transform(),
            textcoords="offset points",
            ha="right",
            parse_math=False,
        )


def _draw_differences(axes: Axes, curves: Sequence[Curve], looks: Sequence[plotted.Look]) -> None:
    """A logarithmic axis cannot show 0: there a curve has a gap."""
    axes.set_yscale("log")
    of_others = [curve.differences(curves[0]) for curve in curves[1:]]
    lines = [_line([one or math.nan for one in own], look) for own, look in zip(of_others, looks, strict=True)]
    plotted.overlay(axes, lines)
    if not any(any(own) for own in of_others):
        axes.text(0.5, 0.5, "no run differs from the first one", ha="center", va="center", transform=axes.transAxes)
        axes.set_yticks([], minor=False)
    axes.set_ylabel("relative difference\nfrom the first run")


def _handles(curves: Sequence[Curve], looks: Sequence[plotted.Look]) -> list[Artist]:
    """The legend says of a run that it has no line of differences."""
    from matplotlib.lines import Line2D

    first, *others = curves
    handles: list[Artist] = [Line2D([], [], label=f"{first.title} (the first run)", **_first([]))]
    for curve, look in zip(others, looks, strict=True):
        differs = any(curve.differences(first))
        handles.append(plotted.handle(curve.title if differs else f"{curve.title} (no difference)", look))
    return handles


def _line(values: Sequence[float], look: plotted.Look) -> plotted.Line:
    return plotted.Line(range(len(values)), values, look)


def _first(losses: Sequence[float]) -> dict[str, Any]:
    """Its look; of a single step there is a mark."""
    return {"color": FIRST, "linewidth": _FIRST_PT, "marker": "o" if len(losses) == 1 else ""}


def _level(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    if not name.strip():
        raise argparse.ArgumentTypeError(f'{text!r} has no name, as in "unigram entropy=3.26"')
    try:
        return name.strip(), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} of {name} is no number") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
