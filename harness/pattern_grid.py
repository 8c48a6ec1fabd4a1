"""A pattern as text: two periods of its steady state, a row for each device and link, time from left to right."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from harness.op import Op
from harness.pattern import Pattern
from harness.schedule.validity import ROUNDING, Ran, Replay

SHOWN = 2
"""Periods."""
IDLE, GOING = ".", "-"
NAMELESS = "no room for the names of"
LEGEND = "1B2: backward of stage 1, two periods after its micro-batch began; 0>1: message from stage 0 to 1"


@dataclass(frozen=True)
class Box:
    """An op in the picture: from `start` to `end`, in periods from the left edge, maybe beyond one of the edges.

    It began in the period whose index is `late` more than that of its micro-batch.
    """

    op: Op
    late: int
    start: float
    end: float

    def labels(self) -> Iterator[str]:
        """What it is, at length and in short: 1B2, 1B, B; 0>1 2, 0>1, >."""
        if self.op.peer is None:
            yield from (f"{self.op.stage}{self.op.kind}{self.late}", f"{self.op.stage}{self.op.kind}", self.op.kind)
        else:
            ends = (self.op.peer, self.op.stage)
            source, target = ends if self.op.kind != "send" else ends[::-1]
            yield from (f"{source}>{target} {self.late}", f"{source}>{target}", ">")


def grid(pattern: Pattern, durations: Mapping[str, float], width: int = 100) -> str:
    """At most `width` columns; `durations` are seconds by the notation of ops with micro-batch 0. For valid patterns.

    period      |0             |1             |
    device 0    |0F0--...0B2---|0F0--...0B2---|      ... idle; an op without room for its label shows less of it, a
    device 1    |---1F0--.1B0--|---1F0--.1B0--|      very short one nothing; --- at the left edge is what goes on
    link 0 - 1  |..>--0>1 0----|..>--0>1 0----|
    no room for the names of: link 0 - 1: 1>0 1      in order of time, for each row

    What goes over the end of a period has its label behind it, if there is more room. Both directions of a link have
    one row where they are never busy at the same time. Raises KeyError for an op that has no duration.
    """
    rows = boxes(pattern, durations)
    margin = max(map(len, rows), default=0)
    cells = max(8, (width - margin - 3 - SHOWN) // SHOWN)
    lines = [_line("period", [str(k).ljust(cells) for k in range(SHOWN)], margin)]
    lacking = []
    for name, own in rows.items():
        text, nameless = _cells(own, cells)
        lines.append(_line(name, text, margin))
        lacking += [f"{name}: {', '.join(nameless)}"] if nameless else []
    told = textwrap.wrap(f"{NAMELESS} {'; '.join(lacking)}", width, break_on_hyphens=False) if lacking else []
    return "\n".join([*lines, *told, LEGEND])


def boxes(pattern: Pattern, durations: Mapping[str, float]) -> dict[str, list[Box]]:
    """The rows of a picture by their names, devices before links; in each what runs in `SHOWN` periods, by time."""
    replay = Replay(pattern, durations, SHOWN)
    used: dict[tuple[int, ...], list[Ran]] = {}
    for ran in sorted(replay.ran, key=lambda ran: (ran.start_s, ran.end_s)):
        used.setdefault(ran.place, []).append(ran)
    found = {}
    for place, runs in sorted(used.items(), key=lambda item: (len(item[0]), sorted(item[0]), item[0])):
        back = used.get(place[::-1], []) if len(place) == 2 and place[0] != place[1] else []
        both = sorted([*runs, *back], key=lambda ran: (ran.start_s, ran.end_s))
        if len(place) == 1:
            found[f"device {place[0]}"] = list(_shown(runs, replay))
        elif back and _alone(both, pattern.period_s):
            found[f"link {min(place)} - {max(place)}"] = list(_shown(both, replay))
        else:
            found[f"link {place[0]} > {place[1]}"] = list(_shown(runs, replay))
    return found


def _alone(runs: Sequence[Ran], period_s: float) -> bool:
    """Whether each ends before the next one begins."""
    return all(a.end_s <= b.start_s + ROUNDING * period_s for a, b in pairwise(runs))


def _shown(runs: Iterable[Ran], replay: Replay) -> Iterator[Box]:
    """Of one row what is seen in the first periods of the steady state."""
    period = replay.pattern.period_s
    for ran in runs:
        start, end = ran.start_s / period - replay.steady, ran.end_s / period - replay.steady
        if end > ROUNDING and start < SHOWN - ROUNDING:
            assert ran.op.micro_batch is not None
            began = math.floor(start + ROUNDING) + replay.steady
            yield Box(replace(ran.op, micro_batch=0), began - ran.op.micro_batch, start, end)


def _cells(row: Sequence[Box], cells: int) -> tuple[list[str], list[str]]:
    """The text of each period, and the names that stand nowhere in it."""
    text = [IDLE] * (SHOWN * cells)
    edges = [(math.floor(box.start * cells + 0.5), math.floor(box.end * cells + 0.5)) for box in row]
    wide = {first for first, after in edges if first < after}
    starts = {first for first, _ in edges}
    names: dict[str, bool] = {}
    for box, (first, after) in zip(row, edges, strict=True):
        at, label = _placed(box, first, after, cells, after in starts)
        low, high = max(first, 0), min(after, len(text))
        if first < after:
            text[low:high] = (GOING * (at - first) + label).ljust(after - first, GOING)[low - first : high - first]
        elif 0 <= first < len(text) and first not in wide and text[first] == IDLE:
            text[first] = label
        name = next(box.labels())
        names[name] = names.get(name, False) or (label == name and 0 <= at < len(text))
    nameless = [name for name, stands in names.items() if not stands]
    return ["".join(text[k * cells : (k + 1) * cells]) for k in range(SHOWN)], nameless


def _placed(box: Box, first: int, after: int, cells: int, followed: bool) -> tuple[int, str]:
    """Where the label of a box stands, and how much of it: in the first part that has room for most of it.

    The box is of the columns `first` up to `after`; the end of a period cuts it. What is `followed` at once by another
    one leaves a column free.
    """
    bar = (first // cells + 1) * cells
    parts = [(first, bar - first), (bar, after - bar - followed)] if bar < after else []
    parts = parts or [(first, after - first - (followed and bar > after))]
    return next((at, label) for label in box.labels() for at, room in parts if len(label) <= max(room, 1))


def _line(name: str, periods: Iterable[str], margin: int) -> str:
    return f"{name:<{margin}}  |{'|'.join(periods)}|"
