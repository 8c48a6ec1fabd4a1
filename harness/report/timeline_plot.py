"""Draws traces as a picture: a lane for each device and queue, a box for each op, milliseconds from left to right.

    engine=gpipe model=unet, measured                                             title
    step 553 ms   mean utilization 89 %   144 spans            utilization        facts
    device 0   compute  |0|1|2|3|        |3|3|2|2|                    86 %
               copy in                   |    |
    device 1   compute     |0|1|2|3||3|3|2|2|                         92 %
               copy in    | | |
                                                                                  the next panel, on the same axis
                        0         100        200  ms

Several panels share one axis that begins where each one's step begins, so that equal widths are equal times.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core import files
from harness.core.trace import Trace
from harness.report.timeline_layout import (
    COMPUTE_PX,
    DENSE,
    INNER_PX,
    LEFT_PX,
    LINE_PX,
    WIDTH_PX,
    Box,
    LaneBoxes,
    Panel,
    last_step,
    lay_out,
)

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_HEIGHT_PX = 30_000
DPI = 100
TOP_PX, BOTTOM_PX, _GAP_PX = 26, 46, 14
_MARGIN_PX = 10
_TITLE_PT, _NAME_PT, _SMALL_PT, _DIGIT_PT = 11, 9, 8.5, 7.5
_DIGIT_PX, _WRITTEN_PX = 6.5, 12
"""The width of a digit, and the least height of a box that has one."""
_EDGED_PX, _NARROWEST_PX = 3, 1.0
_GROUND = "#F2F2F2"


@dataclass(frozen=True)
class Style:
    """Colours of the ops of one kind, from Okabe and Ito's palette, which colour-blind readers can distinguish."""

    label: str
    fill: str
    ink: str = "white"


STYLES = {
    "F": Style("forward", "#0072B2"),
    "B": Style("backward", "#E69F00", "black"),
    "I": Style("input gradient", "#D55E00"),
    "W": Style("weight gradient", "#F0E442", "black"),
    "R": Style("recompute", "#009E73"),
    "copy": Style("copy", "#CC79A7", "black"),
    "send": Style("send", "#CC79A7", "black"),
    "recv": Style("receive", "#F3CFE3", "black"),
    "collective": Style("collective", "#56B4E9", "black"),
    "step": Style("optimizer", "#333333"),
}


def draw(trace: Trace, path: Path, title: str = "", step: int | None = None) -> None:
    """Writes the timeline of one step (the last one by default) to `path` as a PNG, 1200 pixels wide.

    A compute lane ends with the device's utilization in this step. Raises ValueError for a step without spans.
    """
    if step is None:
        step = last_step(trace)
    if not any(span.step == step for span in trace.spans):
        steps = sorted({span.step for span in trace.spans})
        raise ValueError(f"the trace has no spans of step {step}, only of {steps or 'no step at all'}")
    draw_panels([(title or f"step {step}", trace.only(step))], path)


def draw_panels(panels: Sequence[tuple[str, Trace]], path: Path) -> None:
    """Writes `figure(panels)` to `path` as a PNG, 1200 pixels wide."""
    buffer = io.BytesIO()
    figure(panels).savefig(buffer, format="png", dpi=DPI)
    files.write_bytes(path, buffer.getvalue())


def figure(panels: Sequence[tuple[str, Trace]]) -> Figure:
    """Returns a picture of the timelines of (title, trace of one step), one below the other.

    Of a trace with several steps the last one is drawn. Raises ValueError for no panel, for a trace without spans, and
    for a picture that would be too high.
    """
    if not panels:
        raise ValueError("a picture needs at least one trace")
    return panels_figure(_stacked(panels))


def _stacked(panels: Sequence[tuple[str, Trace]]) -> list[Panel]:
    laid_out: list[Panel] = []
    top_px: float = TOP_PX
    for title, trace in panels:
        laid_out.append(lay_out(title, trace, top_px))
        top_px = laid_out[-1].bottom_px + _GAP_PX
    if top_px > MAX_HEIGHT_PX:
        raise ValueError(f"{len(panels)} traces make a picture {top_px:.0f} pixels high, {MAX_HEIGHT_PX} at most")
    return laid_out


def panels_figure(panels: Sequence[Panel], below_px: int = 0) -> Figure:
    """Draws one pair of axes for all panels: vertically the picture's pixels downwards, horizontally ms.

    `below_px` pixels below them stay free.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height_px = panels[-1].bottom_px + BOTTOM_PX + below_px
    drawn = Figure(figsize=(WIDTH_PX / DPI, height_px / DPI), dpi=DPI)
    FigureCanvasAgg(drawn)
    bottom = (BOTTOM_PX + below_px) / height_px
    axes = drawn.add_axes((LEFT_PX / WIDTH_PX, bottom, INNER_PX / WIDTH_PX, 1 - bottom))
    axes.set_xlim(0, max(panel.length_ms for panel in panels) or 1)
    axes.set_ylim(height_px - BOTTOM_PX - below_px, 0)
    axes.set_yticks([])
    axes.set_xlabel("time (ms)")
    axes.grid(axis="x", color="white", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["left", "right", "top"]].set_visible(False)
    for panel in panels:
        _draw_frame(axes, panel)
    lanes = [lane for panel in panels for lane in panel.lanes]
    _draw_boxes(axes, lanes)
    _draw_legend(axes, {box.kind for lane in lanes for row in lane.rows for box in row})
    return drawn


def _draw_frame(axes: Axes, panel: Panel) -> None:
    """Draws title and facts above; names of devices and queues on the left, utilization on the right; a grey ground."""
    left_px, right_px = _MARGIN_PX - LEFT_PX, INNER_PX + 8
    middles_px = [panel.top_px + LINE_PX * (number + 0.5) for number in range(len(panel.lines))]
    for line, middle_px in zip(panel.lines[:-1], middles_px, strict=False):
        _write(axes, left_px, middle_px, line, fontsize=_TITLE_PT)
    _write(axes, left_px, middles_px[-1], panel.lines[-1], fontsize=_SMALL_PT, color="#444444")
    _write(axes, right_px, middles_px[-1], "utilization", fontsize=7.5)
    for device in dict.fromkeys(lane.device for lane in panel.lanes):
        lanes = [lane for lane in panel.lanes if lane.device == device]
        top_px, bottom_px = lanes[0].top_px, lanes[-1].bottom_px
        axes.broken_barh([(0, panel.length_ms)], (top_px, bottom_px - top_px), facecolor=_GROUND, zorder=0)
        _write(axes, left_px, (top_px + bottom_px) / 2, f"device {device}", fontsize=_NAME_PT, fontweight="bold")
    for lane in panel.lanes:
        middle_px = (lane.top_px + lane.bottom_px) / 2
        _write(axes, -6, middle_px, lane.queue, fontsize=_SMALL_PT, ha="right")
        if lane.utilization is not None:
            _write(axes, right_px, middle_px, f"{100 * lane.utilization:.0f} %", fontsize=_SMALL_PT)


def _write(axes: Axes, x_px: float, y_px: float, text: str, **style: Any) -> None:
    """Writes text in the margins: pixels from the axis' left end and from the picture's upper edge; "$" is no
    formula."""
    place = axes.get_yaxis_transform()
    axes.text(x_px / INNER_PX, y_px, text, transform=place, va="center", parse_math=False, **style)


def _draw_boxes(axes: Axes, lanes: Sequence[LaneBoxes]) -> None:
    """Draws all boxes of one look together; a row with too many boxes as a strip of mixed colours."""
    from matplotlib.collections import PolyCollection

    pixel_ms = axes.get_xlim()[1] / INNER_PX
    looks: dict[tuple[str, bool], list[list[tuple[float, float]]]] = defaultdict(list)
    for top_px, bottom_px, boxes in _strips(lanes):
        if len(boxes) > DENSE:
            axes.imshow(
                _mixed(boxes, pixel_ms),
                extent=(0, INNER_PX * pixel_ms, bottom_px, top_px),
                aspect="auto",
                interpolation="nearest",
                zorder=1,
            )
            continue
        for box in boxes:
            wide = box.end_ms - box.start_ms >= _EDGED_PX * pixel_ms
            looks[box.kind, wide].append(_corners(box, top_px, bottom_px, pixel_ms))
        if bottom_px - top_px >= _WRITTEN_PX:
            _draw_numbers(axes, boxes, (top_px + bottom_px) / 2, pixel_ms)
    for (kind, wide), corners in looks.items():
        # a white edge separates neighbours, but would wash out a narrow box
        axes.add_collection(
            PolyCollection(corners, facecolor=STYLES[kind].fill, edgecolor="white", linewidth=0.4 if wide else 0),
            autolim=False,
        )


def _strips(lanes: Sequence[LaneBoxes]) -> Iterator[tuple[float, float, list[Box]]]:
    """Yields the upper and lower edge of the boxes of each row, in the picture's pixels."""
    for lane in lanes:
        pad_px = 2 if lane.row_px >= COMPUTE_PX else lane.row_px / 12
        for number, boxes in enumerate(lane.rows):
            top_px = lane.top_px + lane.row_px * number
            yield top_px + pad_px, top_px + lane.row_px - pad_px, boxes


def _corners(box: Box, top_px: float, bottom_px: float, pixel_ms: float) -> list[tuple[float, float]]:
    """Returns the corners of a box; one that takes no time is visible, too, even at the right end of the picture."""
    left = min(box.start_ms, (INNER_PX - _NARROWEST_PX) * pixel_ms)
    right = max(box.end_ms, left + _NARROWEST_PX * pixel_ms)
    return [(left, top_px), (right, top_px), (right, bottom_px), (left, bottom_px)]


def _draw_numbers(axes: Axes, boxes: Sequence[Box], middle_px: float, pixel_ms: float) -> None:
    """Writes the micro-batch into each box that has room for the longest number of its row; its stage above it."""
    letters = max(len(line) for box in boxes for line in box.text.split("\n"))
    needed_ms = _DIGIT_PX * pixel_ms * (letters + 0.6)
    for box in boxes:
        if box.text and box.end_ms - box.start_ms > needed_ms:
            axes.text(
                (box.start_ms + box.end_ms) / 2,
                middle_px,
                box.text,
                clip_on=True,
                parse_math=False,
                ha="center",
                va="center",
                fontsize=_DIGIT_PT,
                linespacing=0.95,
                color=STYLES[box.kind].ink,
            )


def _mixed(boxes: Sequence[Box], pixel_ms: float) -> np.ndarray:
    """Returns the colours (1, pixels, 3) of a row with more boxes than pixels: in each pixel by their share of its
    time.

    until    busy time of one kind before an instant: rises within its boxes, level between them; the share of a
      ____/  pixel is its rise over the pixel
    _/
    """
    import numpy as np
    from matplotlib.colors import to_rgb

    ground = np.array(to_rgb(_GROUND))
    colours = np.tile(ground, (INNER_PX, 1))
    instants = np.arange(INNER_PX + 1) * pixel_ms
    for kind in {box.kind for box in boxes}:
        times = np.array([(box.start_ms, box.end_ms) for box in boxes if box.kind == kind])
        busy = np.concatenate([[0], np.cumsum(times[:, 1] - times[:, 0])])
        until = np.interp(instants, times.ravel(), np.stack([busy[:-1], busy[1:]], axis=1).ravel())
        share = np.diff(until)[:, None] / pixel_ms
        colours += share * (np.array(to_rgb(STYLES[kind].fill)) - ground)
    return np.clip(colours, 0, 1)[None]


def _draw_legend(axes: Axes, kinds: set[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=style.fill, label=style.label) for kind, style in STYLES.items() if kind in kinds]
    axes.legend(
        handles=handles,
        ncols=len(handles),
        loc="upper left",
        bbox_to_anchor=(5 / WIDTH_PX, 1),
        bbox_transform=axes.figure.transFigure,
        frameon=False,
        fontsize=_SMALL_PT,
        borderaxespad=0.2,
        handlelength=1.2,
        handleheight=1.0,
        borderpad=0.2,
    )
