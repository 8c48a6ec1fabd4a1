"""The layout of a timeline's picture: pixels downwards, milliseconds from left to right."""

from __future__ import annotations

import heapq
import textwrap
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from harness.core.op import COMPUTE, Op, Queue
from harness.core.trace import DeviceQueue, Span, Trace

SHOWN_DEVICES = 16
"""The most devices that a panel shows; it says how many it leaves out."""
WIDTH_PX, LEFT_PX, RIGHT_PX = 1200, 150, 70
INNER_PX = WIDTH_PX - LEFT_PX - RIGHT_PX
LINE_PX, COMPUTE_PX = 18, 30
_QUEUE_PX, _LANE_GAP_PX, _DEVICE_GAP_PX = 18, 2, 10
_CONCURRENT_PX, _THINNEST_PX = 72, 3
"""Pixels shared by overlapping boxes, unless a row would become too thin to be visible."""
DENSE = INNER_PX // 2
"""A row of more boxes than this is drawn as a mixture of colours."""
_TITLE_LETTERS = 118
_QUEUES: tuple[str, ...] = get_args(Queue)


@dataclass(frozen=True, slots=True)
class Box:
    """One span, ready to be drawn: its kind, the text in it, its start and end in ms from the step's start, its op."""

    kind: str
    text: str
    start_ms: float
    end_ms: float
    op: str


@dataclass(frozen=True)
class LaneBoxes:
    """One queue: `rows` of boxes that do not overlap, each `row_px` high, from `top_px` of the picture downwards."""

    device: int
    queue: str
    top_px: float
    row_px: float
    rows: list[list[Box]]
    utilization: float | None

    @property
    def bottom_px(self) -> float:
        return self.top_px + self.row_px * len(self.rows)


@dataclass(frozen=True)
class Panel:
    """One step: `lines` of text from `top_px` of the picture downwards, below them the lanes."""

    lines: list[str]
    top_px: float
    length_ms: float
    lanes: list[LaneBoxes]

    @property
    def bottom_px(self) -> float:
        return self.lanes[-1].bottom_px


def last_step(trace: Trace) -> int:
    return max((span.step for span in trace.spans), default=0)


def micro_batch(op: Op) -> str:
    """Returns the text of a box in most pictures: the micro-batch."""
    return "" if op.micro_batch is None else str(op.micro_batch)


def stage_and_micro_batch(op: Op) -> str:
    """Returns the text of a box where a device has several stages: the stage above the micro-batch, in two lines."""
    both = op.kind in COMPUTE and op.micro_batch is not None
    return f"{op.stage}\n{op.micro_batch}" if both else micro_batch(op)


def _several_stages(spans: Sequence[Span]) -> bool:
    """Whether a device computes for more than one stage."""
    stages: dict[int, set[int]] = defaultdict(set)
    for span in spans:
        if span.parsed.kind in COMPUTE and span.parsed.micro_batch is not None:
            stages[span.device].add(span.parsed.stage)
    return any(len(found) > 1 for found in stages.values())


def lay_out(
    title: str, trace: Trace, top_px: float, label: Callable[[Op], str] | None = None, window: str = "step"
) -> Panel:
    """Lays out the last step of a trace, from `top_px` downwards. Raises ValueError for a trace without spans.

    `label` gives the text of a box: by default the micro-batch, below the stage where a device has several. `window`
    is the word for what the picture shows.
    """
    step = last_step(trace)
    spans = sorted((span for span in trace.spans if span.step == step), key=lambda s: (s.start_s, s.end_s))
    if not spans:
        raise ValueError(f"{title}: the trace has no spans")
    times = trace.steps[step] if step < len(trace.steps) else (spans[0].start_s, max(span.end_s for span in spans))
    queues: dict[DeviceQueue, list[Span]] = defaultdict(list)
    for span in spans:
        queues[span.device, span.queue].append(span)
    devices = sorted({device for device, _ in queues})
    used = {
        device: Trace(tuple(of_queue), (times,)).utilization([device])[0]
        for (device, queue), of_queue in queues.items()
        if queue == "compute"
    }
    shown = {lane: queues[lane] for lane in sorted(queues, key=_order) if lane[0] in devices[:SHOWN_DEVICES]}
    lines = textwrap.wrap(title, _TITLE_LETTERS)
    several = label is None and _several_stages(spans)
    label = label or (stage_and_micro_batch if several else micro_batch)
    split = {(span.parsed.stage, span.parsed.micro_batch) for span in spans if span.parsed.kind == "W"}
    boxes = {lane: [_box(span, times[0], label, split) for span in of_lane] for lane, of_lane in shown.items()}
    lanes = list(_lanes(boxes, used, top_px + LINE_PX * (len(lines) + 1)))
    length_ms = 1e3 * (times[1] - times[0])
    facts = f"{window} {_facts(length_ms, used, len(spans), len(devices), lanes)}"
    facts += "     in a box: stage above micro-batch" * several
    return Panel([*lines, facts], top_px, length_ms, lanes)


def _order(lane: DeviceQueue) -> tuple[int, int]:
    """Sorts by device, then in the order in which `harness.core.op.Queue` names the queues."""
    return lane[0], _QUEUES.index(lane[1])


def _facts(length_ms: float, used: Mapping[int, float], spans: int, devices: int, lanes: Sequence[LaneBoxes]) -> str:
    """Returns the text 553 ms     mean utilization 89 %     144 spans"""
    facts = [f"{length_ms:,.0f} ms" if length_ms >= 1e3 else f"{length_ms:.3g} ms"]
    if used:
        facts.append(f"mean utilization {100 * sum(used.values()) / len(used):.0f} %")
    facts.append(f"{spans:,} spans")
    if devices > SHOWN_DEVICES:
        facts.append(f"the first {SHOWN_DEVICES} of {devices} devices")
    if any(len(row) > DENSE for lane in lanes for row in lane.rows):
        facts.append("colours mix where boxes are narrower than a pixel")
    return "     ".join(facts)


def _lanes(queues: Mapping[DeviceQueue, list[Box]], used: Mapping[int, float], top_px: float) -> Iterator[LaneBoxes]:
    """Yields lanes from `top_px` downwards; a gap separates the devices."""
    previous: int | None = None
    for (device, queue), boxes in queues.items():
        if previous is not None:
            top_px += _LANE_GAP_PX if previous == device else _DEVICE_GAP_PX
        rows = _rows(boxes) if queue == "network" else [boxes]
        row_px = COMPUTE_PX if queue == "compute" else max(_THINNEST_PX, min(_QUEUE_PX, _CONCURRENT_PX / len(rows)))
        lane = LaneBoxes(device, queue, top_px, row_px, rows, used[device] if queue == "compute" else None)
        yield lane
        previous, top_px = device, lane.bottom_px


def _box(span: Span, origin_s: float, label: Callable[[Op], str], split: Container[tuple[int, int | None]]) -> Box:
    """Makes the box of a span; a backward pass whose weights follow (`split`) is that of the inputs, "I"."""
    op = span.parsed
    kind = "I" if op.kind == "B" and (op.stage, op.micro_batch) in split else op.kind
    start_ms, end_ms = 1e3 * (span.start_s - origin_s), 1e3 * (span.end_s - origin_s)
    return Box(kind, label(op), start_ms, end_ms, span.op)


def _rows(boxes: Sequence[Box]) -> list[list[Box]]:
    """Places boxes that may overlap, sorted by start, in as few rows as possible: each in the first free one.

    |0---|  |2-|
       |1------|    ->  two rows
    """
    rows: list[list[Box]] = []
    free: list[int] = []
    ends: list[tuple[float, int]] = []
    touching_ms = 1e-6 * max(box.end_ms for box in boxes)  # times in a file are rounded
    for box in boxes:
        while ends and ends[0][0] <= box.start_ms + touching_ms:
            heapq.heappush(free, heapq.heappop(ends)[1])
        if not free:
            free.append(len(rows))
            rows.append([])
        row = heapq.heappop(free)
        rows[row].append(box)
        heapq.heappush(ends, (box.end_ms, row))
    return rows
