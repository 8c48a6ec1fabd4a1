"""Traces: which op ran on which device and queue, and when. Engines and the simulator make them."""

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

from harness.core import files
from harness.core.op import COMPUTE, Op

DeviceQueue = tuple[int, str]  # (device, queue)
LEVEL = 6
"""Compression level of gzip: the highest one takes three times as long for a few per cent."""
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
        """The op, parsed once; raises ValueError for a span that is not of an op."""
        return Op.parse(self.op)


@dataclass(frozen=True)
class Trace:
    """Spans of one or more steps; `steps` holds (start_s, end_s) of each step on the same clock."""

    spans: tuple[Span, ...]
    steps: tuple[tuple[float, float], ...] = ()

    def queues(self, step: int | None = None) -> dict[DeviceQueue, list[Span]]:
        """Maps each (device, queue) to its spans in order of their start."""
        queues: dict[DeviceQueue, list[Span]] = defaultdict(list)
        for span in sorted(self.spans, key=lambda s: (s.start_s, s.end_s)):
            if step is None or span.step == step:
                queues[(span.device, span.queue)].append(span)
        return dict(sorted(queues.items(), key=lambda item: (item[0][0], item[0][1] != "compute", item[0][1])))

    def only(self, step: int) -> Trace:
        """Returns a trace of one step alone, as its step 0."""
        spans = tuple(replace(span, step=0) for span in self.spans if span.step == step)
        return Trace(spans, (self.steps[step],) if self.steps else ())

    @property
    def window_s(self) -> float:
        """Wall time of the steps (of the spans, where no steps are noted)."""
        if self.steps:
            return sum(end - start for start, end in self.steps)
        return max((s.end_s for s in self.spans), default=0.0) - min((s.start_s for s in self.spans), default=0.0)

    def busy_s(self, device: int) -> float:
        """Returns the seconds in which the device's compute queue executed tasks of the model (copies there are not
        compute)."""
        return _union(
            (s.start_s, s.end_s)
            for s in self.spans
            if s.device == device and s.queue == "compute" and s.parsed.kind in COMPUTE
        )

    def utilization(self, devices: Iterable[int]) -> list[float]:
        """Returns busy compute time / wall time for each device."""
        window = self.window_s
        return [self.busy_s(device) / window if window else 0.0 for device in devices]

    def collective_s(self, device: int) -> float:
        """Returns the seconds in which the device took part in collectives, waiting for the others included."""
        return _union((s.start_s, s.end_s) for s in self.spans if s.device == device and s.parsed.kind == "collective")

    def in_flight(self, device: int) -> int:
        """Returns the most micro-batches that a device has in flight, from the start of F to the end of B.

        A device computes one task at a time, so an earlier task has ended when the next one starts.
        """
        tasks = (
            (span.start_s, span.parsed.kind)
            for span in self.spans
            if span.device == device and span.parsed.kind in ("F", "B")
        )
        return max(accumulate(1 if kind == "F" else -1 for _, kind in sorted(tasks)), default=0)

    def save(self, path: Path) -> None:
        """Writes Chrome trace events (open in ui.perfetto.dev or chrome://tracing), gzipped."""
        text = json.dumps({"traceEvents": self._events(), "displayTimeUnit": "ms"})
        files.write_bytes(path, gzip.compress(text.encode(), LEVEL, mtime=0))

    def _events(self) -> list[dict[str, Any]]:
        """Returns events with a process for each device and one for the steps, a thread for each queue.

        Perfetto reserves the number 0.
        """
        queues = self.queues()
        rows = {queue: number for number, queue in enumerate(queues, start=1)}
        names = {device + 1: f"device {device}" for device, _ in queues}
        above = max(names, default=0) + 1
        if self.steps:
            names[above] = "steps"
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}} for pid, name in names.items()
        ]
        for (device, name), row in rows.items():
            events.append({"ph": "M", "name": "thread_name", "pid": device + 1, "tid": row, "args": {"name": name}})
        for number, (start, end) in enumerate(self.steps):
            events.append(
                {
                    "ph": "X",
                    "name": f"step {number}",
                    "cat": "step",
                    "pid": above,
                    "tid": len(rows) + 1,
                    "ts": start * 1e6,
                    "dur": (end - start) * 1e6,
                }
            )
        for queue, spans in queues.items():
            for s in spans:
                events.append(
                    {
                        "ph": "X",
                        "name": s.op,
                        "cat": queue[1],
                        "pid": s.device + 1,
                        "tid": rows[queue],
                        "ts": s.start_s * 1e6,
                        "dur": (s.end_s - s.start_s) * 1e6,
                        "args": {"step": s.step},
                    }
                )
        return events

    @staticmethod
    def load(path: Path) -> Trace:
        """Reads a file written by `save`."""
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
        """Adds a step and its spans."""
        self._steps.append(((start_s, end_s), list(spans)))

    def trace(self) -> Trace:
        """Returns the trace of the steps that are kept, numbered from 0."""
        spans = [replace(span, step=number) for number, (_, of_step) in enumerate(self._steps) for span in of_step]
        return Trace(tuple(spans), tuple(times for times, _ in self._steps))


def _union(intervals: Iterable[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
