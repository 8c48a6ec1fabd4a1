"""Loss curves of several runs in one picture, and how far they are apart:

    python -m analysis.losses RUN_DIR [RUN_DIR ...] --out FILE.png [--titles "A,B"] [--level "unigram entropy=3.26"]

    loss        |\\___  - - - - - -   a line for each run, the first one the widest; a level is dashed
                |    \\_________
    difference  |  _____-----~~~     of each other run from the first one, |a - b| / max(|a|, |b|), logarithmic
                +---------------- step

A sweep's folder means all its points, in the order in which they started. Steps count from 0, warm-up included; what
only some runs have is not compared. A run without losses, such as an infeasible one, is skipped and named; several of a
sweep in one line.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis import run_artifacts, run_folders
from analysis.plots import style
from analysis.run_folders import NoRun, Run, listed, load, titled
from harness.core import problem
from harness.worker.training_loop import METRICS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIRST = "#BBBBBB"
"""Grey, for the run that the others are held against; the others have the palette of all pictures."""
_SIZE_IN = (12.0, 7.0)
_WIDEST_PT, _NARROWEST_PT = 8.0, 1.0
"""Lines get narrower from run to run, so that equal curves are seen one on the other."""
_ALONE_PT, _OF_DIFFERENCES_PT = 1.5, 2.5
"""The width of a single run's line, and the most for one of differences."""


@dataclass(frozen=True)
class Curve:
    """A run's loss in each step; the `note` says of a run that has not ended what became of it."""

    title: str
    losses: tuple[float, ...]
    note: str = ""

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
    options = parser.parse_args(arguments)
    try:
        all_curves, skipped = curves(options.folders, options.titles)
        draw(all_curves, options.out, options.levels)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    for line in skipped:
        print(f"skipped {line}", file=sys.stderr)
    for curve in all_curves:
        if curve.note:
            print(curve.note, file=sys.stderr)
    print("\n".join([*report(all_curves), f"{options.out}: {len(all_curves)} runs"]))
    return 0


def curves(folders: Sequence[Path], titles: Sequence[str] | None = None) -> tuple[list[Curve], list[str]]:
    """The curves of all runs with losses, and a line for each run without; `titles` are those of the curves, in order.

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
    notes = map(_note, runs)
    return [Curve(*parts) for parts in zip(titled(runs, titles), losses, notes, strict=True)], skipped


def _note(run: Run) -> str:
    """Of a run without an end: that its curve may grow, or that it is lost."""
    record = run.record
    if record.status not in ("running", "lost", "unknown"):
        return ""
    return f"{run.folder}   is {record.status}" + (f": {record.reason}" if record.reason else "")


def _skipped(folder: Path, without: Sequence[tuple[Run, run_artifacts.MissingData]]) -> list[str]:
    """A line for each run whose file is missing or damaged; of several that did not train one line in all."""
    untrained = [run for run, _ in without if _untrained(run)]
    if len(untrained) < 2:
        return [_without(run, error) for run, error in without]
    newest = run_folders.newest_points(folder)
    states = [_state(run, newest) for run in untrained]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    summary = f"{len(untrained)} points of {folder} without losses: {counts}   -> python -m slurm.status {folder}"
    return [*(_without(run, error) for run, error in without if not _untrained(run)), summary]


def _untrained(run: Run) -> bool:
    return run.record.status != "ok" or run.record.source != "measured"


def _state(run: Run, newest: Set[str] | None) -> str:
    """infeasible, simulated, infeasible of an earlier sweep"""
    state = run.record.status if run.record.status != "ok" else run.record.source
    return state if newest is None or run.folder.name in newest else f"{state} of an earlier sweep"


def _without(run: Run, error: run_artifacts.MissingData) -> str:
    """Why a run has no losses: how it ended, or what is wrong with its file."""
    record = run.record
    if record.status == "ok":
        return str(error)
    why = problem.line(record.problems[0]) if record.problems else next(iter(record.reason.strip().splitlines()), "")
    return f"{run.folder}   ended as {record.status}" + (f": {why}" if why else "")


def report(curves: Sequence[Curve]) -> list[str]:
    """A line for each run: steps, first and last loss, and its largest difference from the first run."""
    width = max(len(curve.title) for curve in curves)
    lines = [f"{'run':{width}}  steps  first loss   last loss  largest difference from the first run"]
    for number, curve in enumerate(curves):
        lines.append(f"{curve.title:{width}}  {len(curve.losses):5}  {curve.losses[0]:10.6f}  {curve.losses[-1]:10.6f}")
        if number:
            differences = curve.differences(curves[0])
            largest = max(differences)
            lines[-1] += f"  {largest:.2e} at step {differences.index(largest)}" if largest else "  none"
    return lines


def draw(curves: Sequence[Curve], path: Path, levels: Sequence[tuple[str, float]] = ()) -> None:
    """Write the picture to `path` as a PNG, 1200 x 700 pixels."""
    style.write(figure(curves, levels), path)


@style.styled
def figure(curves: Sequence[Curve], levels: Sequence[tuple[str, float]] = ()) -> Figure:
    """Losses above; below, where there are several runs, their differences from the first one."""
    several = len(curves) > 1
    drawn, axes = style.panels(1 + several, 1, *_SIZE_IN, sharex=True, height_ratios=(2, 1)[: 1 + several])
    _draw_losses(axes[0, 0], curves, levels)
    if several:
        _draw_differences(axes[1, 0], curves)
    axes[-1, 0].set_xlabel("step")
    axes[-1, 0].xaxis.get_major_locator().set_params(integer=True)
    return drawn


def _draw_losses(axes: Axes, curves: Sequence[Curve], levels: Sequence[tuple[str, float]]) -> None:
    for number, curve in enumerate(curves):
        axes.plot(curve.losses, label=curve.title, **_style(number, len(curves)))
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
    axes.set_ylabel("loss")
    axes.margins(x=0.01)
    style.distinguished(axes)


def _draw_differences(axes: Axes, curves: Sequence[Curve]) -> None:
    """A logarithmic axis cannot show 0: there a curve has a gap."""
    for number, curve in enumerate(curves[1:], start=1):
        differences = [difference or float("nan") for difference in curve.differences(curves[0])]
        style = _style(number, len(curves))
        axes.plot(differences, **{**style, "linewidth": min(style["linewidth"], _OF_DIFFERENCES_PT)})
    axes.set_yscale("log")
    axes.set_ylabel("difference from\nthe first run")


def _style(number: int, count: int) -> dict[str, Any]:
    narrower = (_WIDEST_PT - _NARROWEST_PT) * number / max(1, count - 1)
    colours = (FIRST, *style.COLOURS)
    return {"color": colours[number % len(colours)], "linewidth": _WIDEST_PT - narrower if count > 1 else _ALONE_PT}


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
