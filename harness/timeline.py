"""A trace as a picture: one lane for each device and queue, one box for each op, milliseconds from left to right."""

from __future__ import annotations

import io
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness import files
from harness.op import Op
from harness.trace import Lane, Span, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_PX = 1200
DPI = 100
_LANE_PX, _GAP_PX, _TOP_PX, _BOTTOM_PX = 30, 12, 62, 50
_LEFT_PX, _RIGHT_PX = 150, 70
_FONT_PT, _DIGIT_PX, _EDGED_PX = 7.5, 6.5, 5


@dataclass(frozen=True)
class Style:
    """How ops of one kind look: colours of Okabe and Ito's palette, which colour-blind readers can tell apart."""

    label: str
    fill: str
    ink: str = "white"


STYLES = {
    "F": Style("forward", "#0072B2"),
    "B": Style("backward", "#E69F00", "black"),
    "W": Style("weight gradient", "#F0E442", "black"),
    "R": Style("recompute", "#009E73"),
    "copy": Style("copy", "#CC79A7", "black"),
    "send": Style("send", "#CC79A7", "black"),
    "recv": Style("receive", "#F3CFE3", "black"),
    "collective": Style("collective", "#56B4E9", "black"),
    "step": Style("optimizer", "#333333"),
}


@dataclass(frozen=True)
class _Box:
    """One span, ready to be drawn: its kind, the text in it, and where it lies in ms from the step's start."""

    kind: str
    text: str
    start_ms: float
    width_ms: float


def draw(trace: Trace, path: Path, title: str = "", step: int | None = None) -> None:
    """Write the timeline of one step (the last one by default) to `path` as a PNG, 1200 pixels wide.

    A compute lane ends with the device's utilization in this step. Raises ValueError for a step without spans.
    """
    if step is None:
        step = max((span.step for span in trace.spans), default=0)
    lanes = trace.lanes(step)
    if not lanes:
        known = sorted({span.step for span in trace.spans})
        raise ValueError(f"the trace has no spans of step {step}, only of {known or 'no step at all'}")
    start_s, end_s = _window(trace, lanes, step)
    places = _places(list(lanes))
    figure, axes = _canvas(places, 1e3 * (end_s - start_s))
    for lane, spans in lanes.items():
        _draw_lane(axes, places[lane], [_box(span, start_s) for span in spans])
    _draw_frame(axes, places, Trace(tuple(s for spans in lanes.values() for s in spans), ((start_s, end_s),)))
    _draw_legend(axes, {Op.parse(span.op).kind for spans in lanes.values() for span in spans})
    axes.set_title(title or f"step {step}", loc="left", fontsize=11, pad=24)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    files.write_bytes(path, buffer.getvalue())


def _window(trace: Trace, lanes: dict[Lane, list[Span]], step: int) -> tuple[float, float]:
    """Start and end of the step: as the trace notes it, else from its first span to its last."""
    if step < len(trace.steps):
        return trace.steps[step]
    spans = [span for lane in lanes.values() for span in lane]
    return min(span.start_s for span in spans), max(span.end_s for span in spans)


def _places(lanes: list[Lane]) -> dict[Lane, float]:
    """The upper edge of each lane in pixels from the top; a gap separates the devices."""
    places: dict[Lane, float] = {}
    edge = 0.0
    for before, lane in zip([lanes[0], *lanes], lanes, strict=False):
        edge += _GAP_PX if lane[0] != before[0] else 0
        places[lane] = edge
        edge += _LANE_PX
    return places


def _canvas(places: dict[Lane, float], length_ms: float) -> tuple[Figure, Axes]:
    """A figure as high as its lanes need; the vertical axis counts pixels downwards, the horizontal one ms."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    inner_px = max(places.values()) + _LANE_PX
    height_px = inner_px + _TOP_PX + _BOTTOM_PX
    figure = Figure(figsize=(WIDTH_PX / DPI, height_px / DPI), dpi=DPI)
    FigureCanvasAgg(figure)
    axes = figure.add_axes(
        (_LEFT_PX / WIDTH_PX, _BOTTOM_PX / height_px, 1 - (_LEFT_PX + _RIGHT_PX) / WIDTH_PX, inner_px / height_px)
    )
    axes.set_xlim(0, length_ms or 1)
    axes.set_ylim(inner_px, 0)
    return figure, axes


def _box(span: Span, origin_s: float) -> _Box:
    op = Op.parse(span.op)
    text = "" if op.micro_batch is None else str(op.micro_batch)
    return _Box(op.kind, text, 1e3 * (span.start_s - origin_s), 1e3 * (span.end_s - span.start_s))


def _draw_lane(axes: Axes, top: float, boxes: list[_Box]) -> None:
    left_ms, right_ms = axes.get_xlim()
    pixel_ms = (right_ms - left_ms) / (WIDTH_PX - _LEFT_PX - _RIGHT_PX)
    groups: dict[tuple[str, bool], list[_Box]] = defaultdict(list)
    for box in boxes:
        groups[(box.kind, box.width_ms >= _EDGED_PX * pixel_ms)].append(box)
    for (kind, wide), group in groups.items():
        # a white edge tells neighbours apart, but would wash out a narrow box
        fill = STYLES[kind].fill
        axes.broken_barh([(box.start_ms, box.width_ms) for box in group], (top + 2, _LANE_PX - 4),
                         facecolor=fill, edgecolor="white" if wide else fill, linewidth=0.4)  # fmt: skip
    for box in boxes:
        if box.text and box.width_ms > _DIGIT_PX * pixel_ms * (len(box.text) + 0.6):
            axes.text(box.start_ms + box.width_ms / 2, top + _LANE_PX / 2, box.text, clip_on=True,
                      ha="center", va="center", fontsize=_FONT_PT, color=STYLES[box.kind].ink)  # fmt: skip


def _draw_frame(axes: Axes, places: dict[Lane, float], step: Trace) -> None:
    """Axis, names of devices and queues on the left, utilization on the right."""
    right_ms = axes.get_xlim()[1]
    devices = list(dict.fromkeys(device for device, _ in places))
    for device in devices:
        edges = [top for lane, top in places.items() if lane[0] == device]
        axes.axhspan(min(edges), max(edges) + _LANE_PX, color="#F2F2F2", zorder=0)
        middle = (min(edges) + max(edges) + _LANE_PX) / 2
        axes.annotate(f"device {device}", (0, middle), (-_points(_LEFT_PX - 10), 0), textcoords="offset points",
                      va="center", fontsize=9, fontweight="bold", annotation_clip=False)  # fmt: skip
    for (device, queue), top in places.items():
        axes.annotate(queue, (0, top + _LANE_PX / 2), (-4, 0), textcoords="offset points", va="center", ha="right",
                      fontsize=8.5, annotation_clip=False)  # fmt: skip
        if queue == "compute":
            axes.annotate(f"{100 * step.utilization([device])[0]:.0f} %", (right_ms, top + _LANE_PX / 2), (6, 0),
                          textcoords="offset points", va="center", fontsize=8.5, annotation_clip=False)  # fmt: skip
    axes.annotate("utilization", (1, 1), (4, 5), xycoords="axes fraction", textcoords="offset points", fontsize=8)
    axes.set_yticks([])
    axes.set_xlabel("ms")
    axes.grid(axis="x", color="white", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["left", "right", "top"]].set_visible(False)


def _draw_legend(axes: Axes, kinds: set[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=style.fill, label=style.label) for kind, style in STYLES.items() if kind in kinds]
    axes.legend(handles=handles, ncols=len(handles), loc="lower left", bbox_to_anchor=(0, 1), frameon=False,
                fontsize=8.5, borderaxespad=0.2, handlelength=1.2, handleheight=1.0, borderpad=0.2)  # fmt: skip


def _points(pixels: float) -> float:
    return pixels * 72 / DPI
