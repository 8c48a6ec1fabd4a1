"""A calibration as a picture: measured against fitted, a panel for each collective.

time (s)|            . /      points   medians, with their quartiles
        |        . /          lines    the fit that the cluster file has; dashed the other one
        | . . /               colours  how many ranks
        +-------------- message size (bytes)
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from harness.core import files
from harness.measure.alpha_beta_fit import Timing
from harness.measure.calibration_result import Calibration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE_INCHES, DPI = (12.0, 8.5), 100
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
"""Okabe and Ito's palette, which colour-blind readers can distinguish."""


def draw(found: Calibration, path: Path, title: str) -> None:
    """Write the picture to `path` as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    for axes, name in zip(panels.flat, found.alone, strict=True):
        _panel(axes, found, name)
    for axes in panels[:, 0]:
        axes.set_ylabel("time (s)")
    for axes in panels[1]:
        axes.set_xlabel("message size (bytes)")
    panels.flat[0].legend(loc="upper left", fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    files.write_bytes(path, buffer.getvalue())


def _panel(axes: Axes, found: Calibration, name: str) -> None:
    other = found.plain if found.chosen.weights == "relative" else found.relative
    members = sorted({t.members for t in found.timings})
    for index, count in enumerate(members):
        colour = COLOURS[index % len(COLOURS)]
        timings = [t for t in found.timings if (t.name, t.members) == (name, count)]
        sizes, seconds = [t.bytes for t in timings], [t.seconds for t in timings]
        axes.errorbar(
            sizes, seconds, _spread(timings), fmt="o", color=colour, markersize=5, capsize=3, label=f"{count} ranks"
        )
        for fit, style in ((found.chosen, "-"), (other, "--")):
            label = f"{fit.weights} fit{' (chosen)' * (style == '-')}" if count == members[-1] else None
            axes.plot(sizes, [fit.seconds(t) for t in timings], style, color=colour, linewidth=1.3, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title(name, fontsize=11)
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)


def _spread(timings: list[Timing]) -> list[list[float]]:
    """Distances of the quartiles below and above the medians."""
    quartiles = [t.spread_s or (t.seconds, t.seconds) for t in timings]
    below = [t.seconds - low for t, (low, _) in zip(timings, quartiles, strict=True)]
    above = [high - t.seconds for t, (_, high) in zip(timings, quartiles, strict=True)]
    return [below, above]
