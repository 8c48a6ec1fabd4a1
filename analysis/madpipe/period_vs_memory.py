"""Planned periods against the memory of a device, of any sweep over cluster.memory_gb:

python -m analysis.madpipe.period_vs_memory SWEEP_DIR --out FILE.png

ms  | \\__                  a curve for each planner, number of devices, ... of the sweep
    |    \\____             where no plan fits a curve has no point
    +----------- GB
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from analysis import run_folders
from analysis.plots import curves as plotted
from analysis.plots import style
from harness.core.problem import Problem, ProblemError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEMORY = "cluster.memory_gb"
UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_SIZE_IN = (9.0, 5.0)
Curve = dict[float, float]
"""Periods in seconds by GB; infinite where no plan fits."""


def main(arguments: Sequence[str]) -> int:
    """Returns 0, or 2 where nothing could be drawn; says why on stderr."""
    parser = argparse.ArgumentParser(
        "python -m analysis.madpipe.period_vs_memory", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("folder", type=Path, metavar="SWEEP_DIR")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE.png")
    options = parser.parse_args(arguments)
    try:
        points = _points(options.folder)
        all_curves = _curves(options.folder, points)
        draw(all_curves, options.out, _title(points))
    except (ProblemError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    for title, curve in all_curves.items():
        fits = [memory for memory, period_s in curve.items() if math.isfinite(period_s)]
        print(f"{title}: {len(fits)} of {len(curve)} points have a plan" + (f", from {min(fits):g} GB" if fits else ""))
    print(f"written to {options.out}")
    return 0


def curves(folder: Path) -> dict[str, Curve]:
    """The curves of a sweep by the keys in which they differ, each in order of memory. Points that failed have none.

    Raises ProblemError for a folder without a sweep over the memory of devices, or whose plans have no period.
    """
    return _curves(folder, _points(folder))


def _points(folder: Path) -> list[run_folders.Run]:
    found = run_folders.load(folder)
    return [run for run in found if run.record.status in ("ok", "infeasible") and MEMORY in run.values]


def _title(points: Sequence[run_folders.Run]) -> str:
    """Planned periods of model=mine cluster=flat; a period does not depend on the engine."""
    named = " ".join(word for word in run_folders.common(points) if not word.startswith("engine="))
    return f"Planned periods{' of ' * bool(named)}{named}"


def _curves(folder: Path, points: Sequence[run_folders.Run]) -> dict[str, Curve]:
    if len({run.values[MEMORY] for run in points}) < 2:
        message, hint = "has no points that differ in their memory", "cluster.memory_gb=4,8,16 in the sweep"
        raise ProblemError(Problem(str(folder), None, message, hint=hint))
    keys = [key for key in run_folders.differing(points) if key != MEMORY]
    all_curves: dict[str, Curve] = {}
    for run in sorted(points, key=lambda run: float(run.values[MEMORY])):
        named = (f"{key.rpartition('.')[2]}={run.values[key]}" for key in keys if key in run.values)
        period_s = run.record.predicted.get("period_s", math.inf) if run.record.status == "ok" else math.inf
        all_curves.setdefault(" ".join(named) or run.title, {})[float(run.values[MEMORY])] = period_s
    if not any(math.isfinite(period_s) for curve in all_curves.values() for period_s in curve.values()):
        message, hint = "has no point with a period", "planner=madpipe, contiguous or pipedream, and memory enough"
        raise ProblemError(Problem(str(folder), None, message, hint=hint))
    return all_curves


def draw(all_curves: Mapping[str, Curve], path: Path, title: str) -> None:
    """Write the picture to `path` as a PNG, 900 pixels wide, 500 high and more for a legend of several lines."""
    style.write(figure(all_curves, title), path)


@style.styled
def figure(all_curves: Mapping[str, Curve], title: str) -> Figure:
    """All curves in one panel; a mark at each memory for which there is a plan."""
    longest = max(period_s for curve in all_curves.values() for period_s in curve.values() if math.isfinite(period_s))
    unit, name = next((unit for unit in UNITS if longest >= unit[0]), UNITS[-1])
    drawn, panels = style.panels(1, 1, *_SIZE_IN)
    axes = panels[0, 0]
    looks = plotted.looks(len(all_curves))
    lines = [
        plotted.Line([*curve], [period_s / unit for period_s in curve.values()], look)
        for curve, look in zip(all_curves.values(), looks, strict=True)
    ]
    plotted.overlay(axes, lines, marked=True)
    axes.set(xlabel="memory per device (GB)", ylabel=f"period ({name})")
    axes.margins(y=0.1)
    axes.set_ylim(bottom=0)
    style.title(drawn, title)
    style.below(drawn, list(map(plotted.handle, all_curves, looks)), grow=True)
    return drawn


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
