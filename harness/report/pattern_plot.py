"""Draws a periodic schedule as a PNG: the timeline of two periods of its steady state, and below it the memory of each
device.

`python -m harness.report.pattern_plot RUN` draws that of the plan in a run's folder, as RUN/pattern.png.

model=net, 2 devices, period 3 s, lower bound 2.9 s          drawn by `harness.report.timeline_plot`; 2B1 is the
device 0   |=0F0=|      |==2B1==|=0F0=|      |==2B1==|       backward task of stage 2, one period after its
device 1         |1F0|===1B0===|      |1F0|===1B0===|        micro-batch began
           |- - - - - - - - - -|- - - - - - - - - - -|       limit
device 0   |__/~~~~~\\_____/~~~~~\\____/~~~~~\\____/~~|       stored bytes
           0 ms             3000 ms                6000
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import OmegaConf

from harness.config import overrides
from harness.core import files
from harness.core.op import Op
from harness.core.pattern import Pattern
from harness.core.plan import Plan
from harness.core.problem import Problem, ProblemError
from harness.core.record import RunRecord
from harness.core.run_files import PATTERN, PLAN, RECORD
from harness.core.serialization import SchemaError
from harness.core.trace import Span, Trace
from harness.core.units import seconds
from harness.report.pattern_text import LEGEND, SHOWN, least_s, steady
from harness.report.timeline_layout import INNER_PX, LEFT_PX, LINE_PX, WIDTH_PX, Panel, lay_out
from harness.report.timeline_plot import BOTTOM_PX, DPI, TOP_PX, panels_figure
from harness.schedule.pattern_validity import ROUNDING, ByNumber, Replay

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEMORY_PX, GAP_PX = 84, 14
_SMALL_PT = 8.5
_SMALL_SHARE = 0.25
"""Share of its limit: if no device holds as much, the axes end at the largest maximum, and limits are only text."""
_BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
_LIMIT_COLOUR, _HELD_COLOUR = "#D55E00", "#0072B2"
_STORED_COLOUR, _FIXED_COLOUR = "#9CC7E4", "#BBBBBB"


def draw(
    pattern: Pattern,
    durations: Mapping[str, float],
    path: Path,
    stored: ByNumber,
    fixed: ByNumber,
    limits: ByNumber | int,
    title: str = "",
) -> None:
    """Writes the picture to `path`, 1200 pixels wide. The arguments are those of `pattern_validity.pattern_errors`.

    Raises KeyError for an op that has no duration.
    """
    buffer = io.BytesIO()
    figure(pattern, durations, stored, fixed, limits, title).savefig(buffer, format="png", dpi=DPI)
    files.write_bytes(path, buffer.getvalue())


def draw_plan(plan: Plan, path: Path, title: str = "") -> None:
    """Draws the pattern of a plan with its planner's numbers; above it `title`, devices, period and lower bound.

    Raises ProblemError for a plan without a pattern.
    """
    predicted = plan.predicted
    if plan.pattern is None or "tasks_s" not in predicted:
        raise ProblemError(Problem("the plan", None, "has no pattern", hint="planner=madpipe, contiguous or pipedream"))
    stored, fixed, limit = (predicted[f"{what}_bytes"] for what in ("stored", "fixed", "memory_limit"))
    draw(plan.pattern, predicted["tasks_s"], path, stored, fixed, limit, headline(plan, title))


def headline(plan: Plan, title: str) -> str:
    """Returns the text TITLE, 4 devices, period 349.0 ms, lower bound 349.0 ms"""
    count, bound_s = len(plan.devices), least_s(plan)
    facts = [f"{count} device{'s' * (count > 1)}", f"period {seconds(plan.predicted['period_s'])}"]
    facts += [f"lower bound {seconds(bound_s)}"] if bound_s is not None else []
    return ", ".join([*[title] * bool(title), *facts])


def figure(
    pattern: Pattern,
    durations: Mapping[str, float],
    stored: ByNumber,
    fixed: ByNumber,
    limits: ByNumber | int,
    title: str = "",
) -> Figure:
    """Returns the picture: the timeline, then a panel for the memory of each device that it shows."""
    replay = Replay(pattern, durations, SHOWN)
    curves = {device: _shown(curve, replay) for device, curve in replay.stored(stored, fixed).items()}
    panel = lay_out(title, trace(replay), TOP_PX, label, f"{SHOWN} periods")
    drawn = panels_figure([panel], len(curves) * (MEMORY_PX + GAP_PX))
    limit_of = {device: limits if isinstance(limits, int) else limits[device] for device in curves}
    most = {device: max(held for _, held in curve) for device, curve in curves.items()}
    small = all(most[device] < _SMALL_SHARE * limit_of[device] for device in curves)
    for axes, (device, curve) in zip(_memory_axes(drawn, len(curves)), curves.items(), strict=True):
        top = max(most.values()) if small else max(limit_of[device], most[device])
        _draw_memory(axes, device, curve, fixed[device], limit_of[device], top)
    _explain(drawn, panel)
    for axes in drawn.axes:
        height = 1 - panel.lanes[0].top_px / panel.bottom_px if axes is drawn.axes[0] else 1  # below the title
        for number in range(1, SHOWN):
            axes.axvline(1e3 * number * pattern.period_s, ymax=height, color="#333333", linewidth=1, linestyle=":")
        axes.tick_params(axis="x", labelbottom=axes is drawn.axes[-1], labelsize=_SMALL_PT)
        axes.set_xlabel("time (ms)" if axes is drawn.axes[-1] else "")
    return drawn


def _explain(drawn: Figure, panel: Panel) -> None:
    """Writes what the texts in boxes mean, and adds a legend of the panels of memory."""
    from matplotlib.patches import Patch

    axes = drawn.axes[0]
    middle_px = panel.top_px + LINE_PX * (len(panel.lines) - 0.5)
    axes.text(1, middle_px, LEGEND, transform=axes.get_yaxis_transform(), ha="right", va="center", fontsize=_SMALL_PT)
    stored = Patch(color=_STORED_COLOUR, label="memory of micro-batches")
    fixed = Patch(color=_FIXED_COLOUR, label="memory of weights, gradients, optimizer, buffers")
    right = (LEFT_PX + INNER_PX) / WIDTH_PX
    drawn.legend(
        handles=[stored, fixed],
        ncols=2,
        loc="upper right",
        bbox_to_anchor=(right, 1),
        frameon=False,
        fontsize=_SMALL_PT,
        borderaxespad=0.2,
        handlelength=1.2,
        borderpad=0.2,
    )


def trace(replay: Replay) -> Trace:
    """Returns the first periods of the steady state as one step; ops have their periods as micro-batches."""
    period_s = replay.pattern.period_s
    spans = [
        Span(
            str(box.op),
            box.place[-1],
            "compute" if box.op.peer is None else "network",
            max(box.start, 0.0) * period_s,
            min(box.end, float(SHOWN)) * period_s,
        )
        for box in steady(replay)
    ]
    return Trace(tuple(spans), ((0.0, SHOWN * period_s),))


def label(op: Op) -> str:
    """Returns the text of a box: of a task with its stage, 1B2; of a message its stages, 0>1."""
    return str(op) if op.peer is None else f"{op.peer}>{op.stage}"


def _shown(curve: Sequence[tuple[float, int]], replay: Replay) -> list[tuple[float, int]]:
    """Returns (milliseconds from the left edge, bytes from then on) within the picture; of several at once the last."""
    period_s = replay.pattern.period_s
    points = [(0.0, 0)]
    for at_s, held in curve:
        at = at_s / period_s - replay.steady
        if at < SHOWN - ROUNDING:
            if at - points[-1][0] < ROUNDING:
                points.pop()
            points.append((max(at, 0.0), held))
    return [(1e3 * period_s * at, held) for at, held in [*points, (float(SHOWN), points[-1][1])]]


def _memory_axes(drawn: Figure, count: int) -> list[Axes]:
    """Adds axes for `count` devices below the timeline, from the upper one downwards."""
    whole_px = drawn.bbox.height
    bottoms_px = [BOTTOM_PX + (MEMORY_PX + GAP_PX) * below for below in reversed(range(count))]
    size = (INNER_PX / WIDTH_PX, MEMORY_PX / whole_px)
    return [
        drawn.add_axes((LEFT_PX / WIDTH_PX, bottom_px / whole_px, *size), sharex=drawn.axes[0])
        for bottom_px in bottoms_px
    ]


def _draw_memory(axes: Axes, device: int, curve: Sequence[tuple[float, int]], fixed: int, limit: int, top: int) -> None:
    """Draws permanent bytes in grey, above them those stored for micro-batches, with the maximum and the limit as text.
    The axis ends a little above `top` bytes."""
    at_ms, held = [point[0] for point in curve], [point[1] for point in curve]
    axes.fill_between(at_ms, held, fixed, step="post", color=_STORED_COLOUR, linewidth=0)
    axes.fill_between([at_ms[0], at_ms[-1]], fixed, color=_FIXED_COLOUR, linewidth=0)
    axes.step(at_ms, held, where="post", color=_HELD_COLOUR, linewidth=1.4)
    axes.axhline(limit, color=_LIMIT_COLOUR, linestyle="--", linewidth=1.2)
    axes.set_ylim(0, 1.15 * top or 1)
    axes.spines[["right", "top"]].set_visible(False)
    unit, name = _scale(top)
    ticks = [0.0, top / 2, float(top)]
    axes.set_yticks(ticks, [f"{tick / unit:.3g}" for tick in ticks], fontsize=7.5)
    axes.set_ylabel(f"device {device}\n{name}", fontsize=_SMALL_PT)
    texts = (("limit", limit, _LIMIT_COLOUR), ("max", max(held), _HELD_COLOUR if max(held) <= limit else _LIMIT_COLOUR))
    for height, (what, size, ink) in zip((0.85, 0.6), texts, strict=True):
        unit, name = _scale(size)
        text = f"{what} {size / unit:.3g} {name}"
        axes.text(1.005, height, text, transform=axes.transAxes, fontsize=7.5, va="center", color=ink)


def _scale(largest: float) -> tuple[float, str]:
    """Returns the largest unit not above `largest`; else the smallest."""
    return next((unit for unit in _BYTES if largest >= unit[0]), _BYTES[-1])


def _title(record: Path) -> str:
    """Returns the title of the run of a record; empty for a plan without a record."""
    if not record.is_file():
        return ""
    loaded = RunRecord.load(record)
    return overrides.title(OmegaConf.create(loaded.config), loaded.manifest.get("overrides", []))


def main(arguments: Sequence[str]) -> int:
    """Draws the plan of a run's folder. Returns 2 for a folder without a plan that has a pattern, else 0."""
    description = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser("python -m harness.report.pattern_plot", description=description)
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of a run, with its plan.json")
    folder: Path = parser.parse_args(arguments).run
    try:
        draw_plan(Plan.load(folder / PLAN), folder / PATTERN, _title(folder / RECORD))
    except (OSError, SchemaError, ValueError) as error:
        print(f"{folder}: {error}", file=sys.stderr)
        return 2
    print(f"written to {folder / PATTERN}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
