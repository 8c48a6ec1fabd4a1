"""The pattern of a plan as text: its period and lower bounds, the memory of each device, and two periods as a grid."""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rich.console import Group
from rich.table import Table
from rich.text import Text

from harness.core.op import Op
from harness.core.pattern import Pattern
from harness.core.plan import Plan
from harness.core.units import percent, seconds, size
from harness.schedule.pattern_validity import ROUNDING, Replay

WIDTH = 110
SHOWN = 2
"""Periods."""
IDLE, BUSY = ".", "-"
UNNAMED = "no room for the names of"
LEGEND = "1B2: backward of stage 1, two periods after its micro-batch began; 0>1: message from stage 0 to 1"
BOUND = "lower bound"
OTHER_PERIODS = {
    "least_s": (BOUND, "of whole stages, one device having several"),
    "least_of_any_s": (BOUND, "of any schedule"),
    "whole_s": ("", "the best stages whose layers run as one block"),
    "contiguous_s": ("", "the best consecutive stages"),
}
"""Periods that a planner may report in addition to that of its plan."""
OF_PERIOD = "between one micro-batch and the next; a step has filling and draining, too"
OF_MEMORY = "memory: while the pattern is repeated, as the planner counts; peak memory, above: in the simulated step"


def pattern_text(plan: Plan, pattern: Pattern) -> Group:
    """The three parts, one below the other."""
    text = Text(grid(pattern, plan.predicted["tasks_s"], WIDTH), no_wrap=True)
    return Group(_periods(plan), Text(), _devices(plan), Text(OF_MEMORY), Text(), text)


def least_s(plan: Plan) -> float | None:
    """The longest lower bound of the period that holds for this plan; None if its planner reports none."""
    bounds = [plan.predicted.get(key) for key, (title, _) in OTHER_PERIODS.items() if title]
    return max((bound_s for bound_s in bounds if bound_s is not None and _holds(plan, bound_s)), default=None)


def _holds(plan: Plan, bound_s: float) -> bool:
    """Whether a bound is one of plans of this kind; a plan of another kind may have a shorter period."""
    return bool(bound_s <= plan.predicted["period_s"] * (1 + ROUNDING))


def _periods(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for row in _period_rows(plan):
        table.add_row(*map(Text, row))
    return table


def _period_rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    period_s = plan.predicted["period_s"]
    limited = "" if plan.predicted.get("finished", True) else "the best when time was up; "
    yield "period", seconds(period_s), limited + OF_PERIOD
    if "one_device_s" in plan.predicted:
        speedup = plan.predicted["one_device_s"] / period_s
        yield "speed-up", f"{speedup:.2f}", "over one device with memory enough, without filling"
    for key, (title, meaning) in OTHER_PERIODS.items():
        other_s = plan.predicted.get(key)
        if other_s is None:
            continue
        if title and not _holds(plan, other_s):
            yield "", seconds(other_s), f"{meaning}: this plan is of another kind"
        else:
            yield title, seconds(other_s), meaning + (f": gap {percent(period_s / other_s - 1)}" if title else "")


def _devices(plan: Plan) -> Table:
    """A row for each device: its stages, how many micro-batches each stores, bytes at the fullest moment."""
    table = Table(box=None, pad_edge=False)
    for title in ("device", "stages", "stored micro-batches", "memory", "limit"):
        table.add_column(title, justify="right")
    for device in plan.devices:
        stages = [number for number, stage in enumerate(plan.stages) if stage.device == device]
        stored = [plan.predicted["activations"][number] for number in stages]
        held, limit = plan.predicted["pattern_memory_bytes"][device], plan.predicted["memory_limit_bytes"]
        cells = (device, ", ".join(map(str, stages)), ", ".join(map(str, stored)), size(held), size(limit))
        table.add_row(*(Text(str(cell)) for cell in cells))
    return table


@dataclass(frozen=True)
class Box:
    """An op in the steady state: from `start` to `end`, in periods from the left edge, maybe beyond one of the edges.

    The micro-batch of `op` is the number of periods by which it starts after the period of its micro-batch. `place` is
    (device,), or for a message (source device, target device).
    """

    op: Op
    place: tuple[int, ...]
    start: float
    end: float

    def labels(self) -> Iterator[str]:
        """Yield the label at decreasing length: 1B2, 1B, B; 0>1 2, 0>1, >."""
        op = self.op
        if op.peer is None:
            yield from (str(op), f"{op.stage}{op.kind}", op.kind)
        else:
            source, target = (op.peer, op.stage) if op.kind != "send" else (op.stage, op.peer)
            yield from (f"{source}>{target} {op.micro_batch}", f"{source}>{target}", ">")


def steady(replay: Replay) -> list[Box]:
    """Return the ops in the first `SHOWN` periods of the steady state, in order of time."""
    period_s, boxes = replay.pattern.period_s, []
    for ran in sorted(replay.ran, key=lambda ran: (ran.start_s, ran.end_s)):
        start, end = ran.start_s / period_s - replay.steady, ran.end_s / period_s - replay.steady
        if end > ROUNDING and start < SHOWN - ROUNDING:
            assert ran.op.micro_batch is not None
            late = math.floor(start + ROUNDING) + replay.steady - ran.op.micro_batch
            boxes.append(Box(replace(ran.op, micro_batch=late), ran.place, start, end))
    return boxes


def grid_rows(pattern: Pattern, durations: Mapping[str, float]) -> dict[str, list[Box]]:
    """The rows of the grid by their names, devices before links."""
    used: dict[tuple[int, ...], list[Box]] = defaultdict(list)
    for box in steady(Replay(pattern, durations, SHOWN)):
        used[box.place].append(box)
    named = {}
    for place, boxes in sorted(used.items(), key=lambda item: (len(item[0]), sorted(item[0]), item[0])):
        back = used.get(place[::-1], []) if len(place) == 2 and place[0] != place[1] else []
        both = sorted([*boxes, *back], key=lambda box: (box.start, box.end))
        if len(place) == 1:
            named[f"device {place[0]}"] = boxes
        elif back and all(first.end <= second.start + ROUNDING for first, second in pairwise(both)):
            named[f"link {min(place)} - {max(place)}"] = both
        else:
            named[f"link {place[0]} > {place[1]}"] = boxes
    return named


def grid(pattern: Pattern, durations: Mapping[str, float], width: int = 100) -> str:
    """Draw a valid pattern in at most `width` columns; `durations` are seconds by the notation of ops with micro-batch
    0.

    period      |0             |1             |
    device 0    |0F0--...0B2---|0F0--...0B2---|      ... idle; an op without room for its label shows less of it, a
    device 1    |---1F0--.1B0--|---1F0--.1B0--|      very short one nothing; --- at the left edge continues
    link 0 - 1  |..>--0>1 0----|..>--0>1 0----|
    no room for the names of: link 0 - 1: 1>0 1      in order of time, for each row

    An op that crosses the end of a period has its label after it, if there is more room. Both directions of a link have
    one row where they are never busy at the same time. Raises KeyError for an op that has no duration.
    """
    named = grid_rows(pattern, durations)
    margin = max(map(len, named), default=0)
    cells = max(8, (width - margin - 3 - SHOWN) // SHOWN)
    lines = [_line("period", [str(k).ljust(cells) for k in range(SHOWN)], margin)]
    all_unnamed = []
    for name, boxes in named.items():
        text, unnamed = _cells(boxes, cells)
        lines.append(_line(name, text, margin))
        all_unnamed += [f"{name}: {', '.join(unnamed)}"] if unnamed else []
    if all_unnamed:
        lines += textwrap.wrap(f"{UNNAMED} {'; '.join(all_unnamed)}", width, break_on_hyphens=False)
    return "\n".join([*lines, LEGEND])


def _cells(boxes: Sequence[Box], cells: int) -> tuple[list[str], list[str]]:
    """The text of each period, and the names for which there is no room in it."""
    text = [IDLE] * (SHOWN * cells)
    edges = [(math.floor(box.start * cells + 0.5), math.floor(box.end * cells + 0.5)) for box in boxes]
    wide = {first for first, after in edges if first < after}
    starts = {first for first, _ in edges}
    written: dict[str, bool] = {}
    for box, (first, after) in zip(boxes, edges, strict=True):
        at, label = _label(box, first, after, cells, after in starts)
        low, high = max(first, 0), min(after, len(text))
        if first < after:
            text[low:high] = (BUSY * (at - first) + label).ljust(after - first, BUSY)[low - first : high - first]
        elif 0 <= first < len(text) and first not in wide and text[first] == IDLE:
            text[first] = label
        name = next(box.labels())
        written[name] = written.get(name, False) or (label == name and 0 <= at < len(text))
    unnamed = [name for name, is_written in written.items() if not is_written]
    return ["".join(text[k * cells : (k + 1) * cells]) for k in range(SHOWN)], unnamed


def _label(box: Box, first: int, after: int, cells: int, followed: bool) -> tuple[int, str]:
    """The column of a box's label, and how much of it is written: in the first part that has room for most of it.

    The box covers the columns `first` up to `after`; the end of a period cuts it. A box that is `followed` at once by
    another one leaves a column free.
    """
    bar = (first // cells + 1) * cells
    parts = [(first, bar - first), (bar, after - bar - followed)] if bar < after else []
    parts = parts or [(first, after - first - (followed and bar > after))]
    return next((at, label) for label in box.labels() for at, room in parts if len(label) <= max(room, 1))


def _line(name: str, periods: Iterable[str], margin: int) -> str:
    return f"{name:<{margin}}  |{'|'.join(periods)}|"
