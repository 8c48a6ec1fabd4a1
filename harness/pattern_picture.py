"""A pattern as a PNG: two periods of its steady state, and below them the memory of each device.

`python -m harness.pattern_picture RUN` draws that of the plan in a run's folder, as RUN/pattern.png.

model=net, 2 devices, period 3 s, lower bound 2.9 s
stages      # 0, 10   # 1                                light: forward   dark: backward
device 0   |=0F0=|      |==2B1==|=0F0=|      |==2B1==|
device 1         |1F0|===1B0===|      |1F0|===1B0===|
link 0 - 1      |0>1|                |0>1|
           |- - - - - - - - - -|- - - - - - - - - - -|     limit
device 0   |__/~~~~~\\_____/~~~~~\\____/~~~~~\\____/~~|     fullest moment
           0 s                3 s                   6 s
"""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import OmegaConf

from harness import files, request
from harness.display import seconds
from harness.op import Op
from harness.pattern import Pattern
from harness.pattern_grid import SHOWN, Box, boxes
from harness.pattern_table import least_s
from harness.plan import Plan
from harness.record import RunRecord
from harness.schedule.validity import ROUNDING, ByNumber, Replay
from harness.serial import SchemaError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#882255", "#999999", "#999933",
)  # fmt: skip
"""Of Okabe and Ito, then of Tol, which colour-blind readers can tell apart; an eleventh stage has the first one's, so
boxes have numbers."""
PICTURE = "pattern.png"
DPI = 100
WIDTH_PX, LEFT_PX, RIGHT_PX, TOP_PX, BOTTOM_PX, GAP_PX = 1200, 110, 120, 62, 46, 14
DEVICE_PX, LINK_PX, MEMORY_PX = 40, 26, 84
INNER_PX = WIDTH_PX - LEFT_PX - RIGHT_PX
_LETTER_PX, _LINE_PX, _SMALL_PT = 7.0, 12.0, 8.5
_SMALL_SHARE = 0.25
"""Of its limit: where no device holds as much, all are drawn by what the fullest one holds, and limits are told."""
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))


def draw(
    pattern: Pattern,
    durations: Mapping[str, float],
    path: Path,
    stored: ByNumber,
    fixed: ByNumber,
    limits: ByNumber | int,
    title: str = "",
) -> None:
    """Write the picture to `path`, 1200 pixels wide. All that it is given is what `validity.faults_of` takes.

    Raises KeyError for an op that has no duration.
    """
    buffer = io.BytesIO()
    figure(pattern, durations, stored, fixed, limits, title).savefig(buffer, format="png", dpi=DPI)
    files.write_bytes(path, buffer.getvalue())


def draw_plan(plan: Plan, path: Path, title: str = "") -> None:
    """The pattern of a plan, with what its planner has told of it: `title`, devices, period and lower bound above.

    Raises ValueError for a plan without a pattern.
    """
    told = plan.predicted
    if plan.pattern is None or "tasks_s" not in told:
        raise ValueError("the plan has no pattern   -> one of planner=madpipe, contiguous or pipedream")
    limit = told["memory_limit_bytes"]
    draw(plan.pattern, told["tasks_s"], path, told["stored_bytes"], told["fixed_bytes"], limit, headline(plan, title))


def headline(plan: Plan, title: str) -> str:
    """TITLE, 4 devices, period 349.0 ms, lower bound 349.0 ms"""
    count, bound_s = len(plan.devices), least_s(plan)
    told = [f"{count} device{'s' * (count > 1)}", f"period {seconds(plan.predicted['period_s'])}"]
    told += [f"lower bound {seconds(bound_s)}"] if bound_s is not None else []
    return ", ".join([*[title] * bool(title), *told])


def figure(
    pattern: Pattern,
    durations: Mapping[str, float],
    stored: ByNumber,
    fixed: ByNumber,
    limits: ByNumber | int,
    title: str = "",
) -> Figure:
    """The picture before it is written: a panel with all rows, then one for the memory of each device."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = boxes(pattern, durations)
    replay = Replay(pattern, durations, SHOWN)
    curves = replay.stored(stored, fixed)
    heights = [sum(map(_height_px, rows)), *[MEMORY_PX] * len(curves)]
    whole_px = TOP_PX + sum(heights) + GAP_PX * len(curves) + BOTTOM_PX
    drawn = Figure(figsize=(WIDTH_PX / DPI, whole_px / DPI), dpi=DPI)
    FigureCanvasAgg(drawn)
    panels = []
    bottom_px = whole_px - TOP_PX + GAP_PX
    for height in heights:
        bottom_px -= height + GAP_PX
        place = (LEFT_PX / WIDTH_PX, bottom_px / whole_px, INNER_PX / WIDTH_PX, height / whole_px)
        panels.append(drawn.add_axes(place))
    _draw_rows(panels[0], rows)
    seen = {device: _seen(curve, replay) for device, curve in curves.items()}
    limit_of = {device: limits if isinstance(limits, int) else limits[device] for device in seen}
    most = {device: max(held for _, held in curve) for device, curve in seen.items()}
    small = all(most[device] < _SMALL_SHARE * limit_of[device] for device in seen)
    for axes, (device, curve) in zip(panels[1:], seen.items(), strict=True):
        top = max(most.values()) if small else max(limit_of[device], most[device])
        _draw_memory(axes, device, curve, fixed[device], limit_of[device], top)
    _draw_time(panels, pattern.period_s)
    _draw_title(drawn, title, sorted({box.op.stage for row in rows.values() for box in row}), whole_px)
    return drawn


def _height_px(name: str) -> int:
    return DEVICE_PX if name.startswith("device") else LINK_PX


def colour(op: Op) -> tuple[str, str]:
    """Of the box and of what is written in it; a message has the colour of the later one of its stages."""
    from matplotlib.colors import to_hex, to_rgb

    stage = max(op.stage, op.peer if op.peer is not None else op.stage)
    base, ground, share = to_rgb(PALETTE[stage % len(PALETTE)]), 1.0 if op.forward else 0.0, 0.6 if op.forward else 0.3
    red, green, blue = (one + (ground - one) * share for one in base)
    return to_hex((red, green, blue)), "black" if op.forward else "white"


def _draw_rows(axes: Axes, rows: Mapping[str, Sequence[Box]]) -> None:
    """Vertically in pixels downwards, horizontally in periods."""
    top_px, middles = 0, []
    for name, row in rows.items():
        height = _height_px(name)
        middles.append(top_px + height / 2)
        axes.broken_barh([(0, SHOWN)], (top_px + 2, height - 4), facecolor="#F2F2F2", zorder=0)
        for box in row:
            _draw_box(axes, box, top_px + 2, height - 4)
        top_px += height
    axes.set_ylim(top_px, 0)
    axes.set_yticks(middles, rows.keys(), fontsize=_SMALL_PT)


def _draw_box(axes: Axes, box: Box, top_px: float, height_px: float) -> None:
    start, end = max(box.start, 0.0), min(box.end, float(SHOWN))
    fill, ink = colour(box.op)
    axes.broken_barh([(start, end - start)], (top_px, height_px), facecolor=fill, edgecolor="white", linewidth=0.8)
    label, turned = _label(box, (end - start) * INNER_PX / SHOWN, height_px)
    axes.text((start + end) / 2, top_px + height_px / 2, label, ha="center", va="center", fontsize=_SMALL_PT, color=ink,
              rotation=90 * turned)  # fmt: skip


def _label(box: Box, width_px: float, height_px: float) -> tuple[str, bool]:
    """As much of a box's label as fits into it, and whether it is turned; of a task at least its stage, if anything."""
    labels = [*box.labels()][: 3 if box.op.peer is not None else 2]
    labels += [str(box.op.stage)] * (box.op.peer is None)
    for label in labels:
        if (len(label) + 0.6) * _LETTER_PX < width_px:
            return label, False
        if (len(label) + 0.6) * _LETTER_PX < height_px and width_px > _LINE_PX:
            return label, True
    return "", False


def _seen(curve: Sequence[tuple[float, int]], replay: Replay) -> list[tuple[float, int]]:
    """(period from the left edge, bytes from then on) of the picture's periods; of several at once the last."""
    found = [(0.0, 0)]
    for at_s, held in curve:
        at = at_s / replay.pattern.period_s - replay.steady
        if at < SHOWN - ROUNDING:
            if at - found[-1][0] < ROUNDING:
                found.pop()
            found.append((max(at, 0.0), held))
    return [*found, (float(SHOWN), found[-1][1])]


def _draw_memory(axes: Axes, device: int, curve: Sequence[tuple[float, int]], fixed: int, limit: int, top: int) -> None:
    """What is there all the time in grey, above it what is stored; on the right limit and fullest moment. The axis ends
    a little above `top` bytes."""
    at, held = [point[0] for point in curve], [point[1] for point in curve]
    unit, name = _scale(_BYTES, top)
    axes.fill_between(at, held, fixed, step="post", color="#9CC7E4", linewidth=0)
    axes.fill_between([0, SHOWN], fixed, color="#BBBBBB", linewidth=0)
    axes.step(at, held, where="post", color="#0072B2", linewidth=1.4)
    axes.axhline(limit, color="#D55E00", linestyle="--", linewidth=1.2)
    axes.set_ylim(0, 1.15 * top or 1)
    ticks = [0.0, top / 2, float(top)]
    axes.set_yticks(ticks, [f"{tick / unit:.3g}" for tick in ticks], fontsize=7.5)
    axes.set_ylabel(f"device {device}\n{name}", fontsize=_SMALL_PT)
    texts = (("limit", limit, "#D55E00"), ("fullest", max(held), "#0072B2" if max(held) <= limit else "#D55E00"))
    for height, (what, size, ink) in zip((0.85, 0.6), texts, strict=True):
        unit, name = _scale(_BYTES, size)
        axes.text(1.01, height, f"{what} {size / unit:.3g} {name}", transform=axes.transAxes, fontsize=_SMALL_PT,
                  va="center", color=ink)  # fmt: skip


def _scale(units: Sequence[tuple[float, str]], largest: float) -> tuple[float, str]:
    """The largest unit of which there is at least one; else the smallest."""
    return next((unit for unit in units if largest >= unit[0]), units[-1])


def _draw_time(panels: Sequence[Axes], period_s: float) -> None:
    """One axis of time for all, from the beginning of the first period."""
    from matplotlib.ticker import MaxNLocator

    unit, name = _scale(_SECONDS, SHOWN * period_s)
    ticks = MaxNLocator(10).tick_values(0, SHOWN * period_s / unit)
    for axes in panels:
        axes.set_xticks([tick * unit / period_s for tick in ticks], [f"{tick:g}" for tick in ticks])
        axes.set_xlim(0, SHOWN)
        axes.tick_params(axis="x", labelbottom=axes is panels[-1], labelsize=_SMALL_PT)
        axes.spines[["right", "top"]].set_visible(False)
        for number in range(1, SHOWN):
            axes.axvline(number, color="#333333", linewidth=1, linestyle=":")
    panels[-1].set_xlabel(name, fontsize=_SMALL_PT)


def _draw_title(drawn: Figure, title: str, stages: Sequence[int], whole_px: float) -> None:
    """The title; below it a patch for each colour with its stages, and how to read boxes."""
    from matplotlib.patches import Patch

    drawn.text(LEFT_PX / WIDTH_PX, 1 - 16 / whole_px, title, va="center", fontsize=11, parse_math=False)
    of_colour = [[str(j) for j in stages if j % len(PALETTE) == number] for number in range(len(PALETTE))]
    handles = [Patch(facecolor=fill, label=", ".join(own)) for fill, own in zip(PALETTE, of_colour, strict=True) if own]
    drawn.text((LEFT_PX - 10) / WIDTH_PX, 1 - 42 / whole_px, "stage", ha="right", va="center", fontsize=_SMALL_PT)
    drawn.legend(handles=handles, ncols=len(handles), loc="center left", frameon=False, fontsize=_SMALL_PT,
                 bbox_to_anchor=(LEFT_PX / WIDTH_PX, 1 - 42 / whole_px), borderaxespad=0, handlelength=1.2,
                 columnspacing=1.2)  # fmt: skip
    drawn.text(1 - 10 / WIDTH_PX, 1 - 42 / whole_px, "light: forward   dark: backward   2B1: one period late",
               ha="right", va="center", fontsize=_SMALL_PT)  # fmt: skip


def _title(record: Path) -> str:
    """What the run of a record was; of a plan without a record nothing is known."""
    if not record.is_file():
        return ""
    found = RunRecord.load(record)
    return request.title(OmegaConf.create(found.config), found.manifest.get("overrides", []))


def main(arguments: Sequence[str]) -> int:
    """Returns 2 for a folder without a plan that has a pattern, else 0."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("python -m harness.pattern_picture RUN: the folder of a run, with its plan.json", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    try:
        draw_plan(Plan.load(folder / "plan.json"), folder / PICTURE, _title(folder / "record.json"))
    except (OSError, SchemaError, ValueError) as error:
        print(f"{folder}: {error}", file=sys.stderr)
        return 2
    print(f"written to {folder / PICTURE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
