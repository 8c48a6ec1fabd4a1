"""Who ran what from when to when: made by engines and by the simulator alike."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from harness import files
from harness.op import COMPUTE, Op

Lane = tuple[int, str]  # (device, queue)
LEVEL = 6
"""Of gzip: the highest one takes three times as long for a few per cent."""
KEPT_STEPS = 100
"""A session keeps the spans of its last steps only, so that a long run does not fill the memory."""


@dataclass(frozen=True)
class Span:
    """`op` (in its short notation) occupied `queue` of `device` from `start_s` to `end_s`, in step `step`."""

    op: str
    device: int
    queue: str
    start_s: float
    end_s: float
    step: int = 0

    @cached_property
    def parsed(self) -> Op:
        """The op; raises ValueError where the span is of none. Parsed once: many figures ask every span."""
        return Op.parse(self.op)


@dataclass(frozen=True)
class Trace:
    """Spans of one or more steps; `steps` holds (start_s, end_s) of each step on the same clock."""

    spans: tuple[Span, ...]
    steps: tuple[tuple[float, float], ...] = ()

    def lanes(self, step: int | None = None) -> dict[Lane, list[Span]]:
        """Spans of each (device, queue) in order of their start."""
        lanes: dict[Lane, list[Span]] = defaultdict(list)
        for span in sorted(self.spans, key=lambda s: (s.start_s, s.end_s)):
            if step is None or span.step == step:
                lanes[(span.device, span.queue)].append(span)
        return dict(sorted(lanes.items(), key=lambda item: (item[0][0], item[0][1] != "compute", item[0][1])))

    def only(self, step: int) -> Trace:
        """The trace of one step alone, as step 0 of a new trace."""
        spans = tuple(replace(span, step=0) for span in self.spans if span.step == step)
        return Trace(spans, (self.steps[step],) if self.steps else ())

    @property
    def window_s(self) -> float:
        """Wall time of the steps (of the spans, where no steps are noted)."""
        if self.steps:
            return sum(end - start for start, end in self.steps)
        return max((s.end_s for s in self.spans), default=0.0) - min((s.start_s for s in self.spans), default=0.0)

    def busy_s(self, device: int) -> float:
        """Seconds in which the device's compute queue executed tasks of the model (copies there are not compute)."""
        return _union(
            (s.start_s, s.end_s)
            for s in self.spans
            if s.device == device and s.queue == "compute" and s.parsed.kind in COMPUTE
        )

    def utilization(self, devices: Iterable[int]) -> list[float]:
        """Busy compute time / wall time for each device."""
        window = self.window_s
        return [self.busy_s(device) / window if window else 0.0 for device in devices]

    def collective_s(self, device: int) -> float:
        """Seconds in which the device took part in collectives, waiting for the others included."""
        return _union((s.start_s, s.end_s) for s in self.spans if s.device == device and s.parsed.kind == "collective")

    def in_flight(self, device: int) -> int:
        """The most micro-batches that a device has between the begin of their forward and the end of their backward
        task at once. It computes one task at a time: what began before a task has ended when that begins."""
        tasks = (
            (span.start_s, span.parsed.kind)
            for span in self.spans
            if span.device == device and span.parsed.kind in ("F", "B")
        )
        return max(accumulate(1 if kind == "F" else -1 for _, kind in sorted(tasks)), default=0)

    def save(self, path: Path) -> None:
        """Write Chrome trace events (open in ui.perfetto.dev or chrome://tracing), gzipped."""
        text = json.dumps({"traceEvents": self._events(), "displayTimeUnit": "ms"})
        files.write_bytes(path, gzip.compress(text.encode(), LEVEL, mtime=0))

    def _events(self) -> list[dict[str, Any]]:
        """A process for each device and one for the steps, a thread for each queue; Perfetto reserves the number 0."""
        lanes = self.lanes()
        rows = {lane: number for number, lane in enumerate(lanes, start=1)}
        names = {device + 1: f"device {device}" for device, _ in lanes}
        above = max(names, default=0) + 1
        if self.steps:
            names[above] = "steps"
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}} for pid, name in names.items()
        ]
        for (device, queue), row in rows.items():
            events.append({"ph": "M", "name": "thread_name", "pid": device + 1, "tid": row, "args": {"name": queue}})
        for number, (start, end) in enumerate(self.steps):
            events.append({"ph": "X", "name": f"step {number}", "cat": "step", "pid": above, "tid": len(rows) + 1,
                           "ts": start * 1e6, "dur": (end - start) * 1e6})  # fmt: skip
        for lane, spans in lanes.items():
            for s in spans:
                events.append({"ph": "X", "name": s.op, "cat": lane[1], "pid": s.device + 1, "tid": rows[lane],
                               "ts": s.start_s * 1e6, "dur": (s.end_s - s.start_s) * 1e6,
                               "args": {"step": s.step}})  # fmt: skip
        return events

    @staticmethod
    def load(path: Path) -> Trace:
        """Read a file written by `save`."""
        events = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
        timed = [(e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6, e) for e in events if e["ph"] == "X"]
        spans = [
            Span(e["name"], e["pid"] - 1, e["cat"], start, end, e["args"]["step"])
            for start, end, e in timed
            if e["cat"] != "step"
        ]
        return Trace(tuple(spans), tuple((start, end) for start, end, e in timed if e["cat"] == "step"))


class Recording:
    """The spans of a session's last steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[tuple[float, float], list[Span]]] = deque(maxlen=KEPT_STEPS)

    def add(self, spans: Iterable[Span], start_s: float, end_s: float) -> None:
        """Note a step and what ran in it."""
        self._steps.append(((start_s, end_s), list(spans)))

    def trace(self) -> Trace:
        """The steps that are kept, numbered from 0."""
        spans = [replace(span, step=number) for number, (_, of_step) in enumerate(self._steps) for span in of_step]
        return Trace(tuple(spans), tuple(times for times, _ in self._steps))


def _union(intervals: Iterable[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
