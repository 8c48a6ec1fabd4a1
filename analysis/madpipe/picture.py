"""Figure 6 as a picture: periods of ResNet-50 against memory, a panel for each number of devices and link."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.madpipe.rows import MADPIPE, Results, Row
from analysis.madpipe.verdicts import BASELINE
from harness import files

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DEVICES, BANDWIDTHS = (2, 4, 6, 8), (12, 24)
CURVES = {BASELINE: ("PipeDream", "#D55E00"), MADPIPE: ("MadPipe", "#0072B2")}
_WIDTH_IN, _HEIGHT_IN, _DPI = 13.0, 6.0, 100


def draw(results: Results, path: Path) -> bool:
    """Write the picture to `path`; False if nothing of it has been run.

    ms |\\  PipeDream            solid: the period of the schedule; dashed: what the first phase hopes for
       | \\____
       |  - - - -
       +---------- GB
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    schemes = results.by_scheme("fig6")
    if not all(name in schemes for name in CURVES):
        return False
    drawn = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(drawn)
    panels = drawn.subplots(len(BANDWIDTHS), len(DEVICES), sharex=True, sharey="col")
    for line, bandwidth in zip(panels, BANDWIDTHS, strict=True):
        for axes, devices in zip(line, DEVICES, strict=True):
            _panel(axes, schemes, devices, bandwidth)
        line[0].set_ylabel("period, ms")
    for axes in panels[-1]:
        axes.set_xlabel("memory of a device, GB")
    panels[0][-1].legend(frameon=False)
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png", dpi=_DPI)
    files.write_bytes(path, buffer.getvalue())
    return True


def _panel(axes: Axes, schemes: dict[str, dict[tuple[str, int, int, int], Row]], devices: int, bandwidth: int) -> None:
    for scheme, (title, colour) in CURVES.items():
        own = [row for (_, p, _, b), row in schemes[scheme].items() if (p, b) == (devices, bandwidth)]
        own.sort(key=lambda row: row.memory_gb)
        for field, style in (("period_s", "-"), ("first_phase_s", "--")):
            values = [getattr(row, field) for row in own]
            shown = [1e3 * value if math.isfinite(value) else math.nan for value in values]
            label = title if style == "-" else None
            memory = [row.memory_gb for row in own]
            axes.plot(memory, shown, style, color=colour, label=label, marker=".", linewidth=1.6)
    axes.set_title(f"{devices} devices, {bandwidth} GB/s", fontsize=10)
    axes.set_ylim(bottom=0)
    axes.set_xticks(range(4, 17, 4))
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
