"""What the devices of a traced step spend their time on: computing, communication, waiting, host.

device 0  |==0F0==|==0F1==|. . . . . . |- - -|==0B0==|==0B1==|.|==step==|
           computing       waiting       com-                 host: nothing is missing, and nothing runs
device 1          |- -|==1F0==|==1B0==|  munication

An idle device waits for what its next op depends on: for a message that is on its way, that is communication; for
another device, waiting; if all is there, the time is the host's (Python, its lock, the wake-up of a process, launches).
The same is asked of a measured and of a simulated trace, so that it shows where the two part.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from harness.core.op import COMPUTE
from harness.core.trace import Span, Trace
from harness.schedule import Schedule

PARTS = ("computing", "communication", "waiting", "host")
ENOUGH = 5
"""Steps from which on the quickest ones of a task say something."""
MESSAGES = ("copy", "send", "recv", "collective")
Interval = tuple[float, float]


def parts_s(trace: Trace, schedule: Schedule) -> dict[str, float] | None:
    """Seconds of each part: the mean of the devices, the median of the steps; None where no trace was left.

    They add up to the step time. The replicas of a device are not in a trace: waiting for them is communication.
    """
    if not trace.spans or not trace.steps:
        return None
    placed = _Placed(schedule)
    found = [_Step(trace.only(number), placed).parts() for number in range(len(trace.steps))]
    return {part: statistics.median(step[part] for step in found) for part in PARTS}


def quickest_computing_s(trace: Trace) -> float | None:
    """What computing takes if each task takes what it does in the quickest tenth of the steps: the mean of the devices.
    Where that is far from what a step does take, something slows the machine down now and then. None with fewer than
    `ENOUGH` steps, or without a trace."""
    taken_s: dict[tuple[int, str], list[float]] = defaultdict(list)
    for span in trace.spans:
        if span.queue == "compute" and span.parsed.kind in COMPUTE:
            taken_s[span.device, span.op].append(span.end_s - span.start_s)
    if len(trace.steps) < ENOUGH or not taken_s:
        return None
    quick = sum(sorted(seconds)[len(seconds) // 10] for seconds in taken_s.values())
    return quick / len({device for device, _ in taken_s})


class _Placed:
    """The graph of a schedule, and the node of each op by where it runs."""

    def __init__(self, schedule: Schedule) -> None:
        self.graph = schedule.graph
        self.nodes: dict[tuple[int, str, str], int] = {
            (queue.device, queue.name, str(op)): node
            for queue, nodes in zip(schedule.queues, self.graph.queues, strict=True)
            for op, node in zip(queue.ops, nodes, strict=True)
        }
        self.previous: dict[int, list[int]] = defaultdict(list)
        for queue, nodes in zip(schedule.queues, self.graph.queues, strict=True):
            for first, then in pairwise(nodes if queue.rule == "in_order" else []):
                self.previous[then].append(first)

    def node(self, span: Span) -> int | None:
        return self.nodes.get((span.device, span.queue, span.op))

    def before(self, node: int | None) -> list[int]:
        """The nodes that must end before a node starts, in its queues, too; those before the barrier in its place."""
        if node is None:
            return []
        graph = self.graph
        needed = [k for one in graph.before[node] for k in (graph.before[one] if one == graph.barrier else [one])]
        return needed + self.previous[node]


class _Step:
    """One step: `ran[k]` are the spans of node k, one for each device that takes part."""

    def __init__(self, trace: Trace, placed: _Placed) -> None:
        self.placed = placed
        self.begin_s, self.end_s = trace.steps[0]
        self.ran: dict[int | None, list[Span]] = defaultdict(list)
        for span in trace.spans:
            self.ran[placed.node(span)].append(span)
        self.computing = {device: spans for (device, queue), spans in trace.queues().items() if queue == "compute"}
        self.last_s = max(span.end_s for span in trace.spans)

    def parts(self) -> dict[str, float]:
        totals = dict.fromkeys(PARTS, 0.0)
        for spans in self.computing.values():
            for part, seconds in self.of_device(spans):
                totals[part] += seconds
        return {part: total / max(1, len(self.computing)) for part, total in totals.items()}

    def of_device(self, spans: Sequence[Span]) -> Iterator[tuple[str, float]]:
        now = self.begin_s
        for span in spans:
            start_s, end_s = max(span.start_s, now), max(span.end_s, now)
            yield from self.idle((now, start_s), span)
            yield from self.busy((start_s, end_s), span)
            now = end_s
        last_s = min(max(self.last_s, now), self.end_s)  # other devices are not done, or other queues of this one
        yield "waiting", last_s - now
        yield "host", max(0.0, self.end_s - last_s)

    def busy(self, ran: Interval, span: Span) -> Iterator[tuple[str, float]]:
        """A task computes; a collective, and a message that blocks, waits until all who take part have begun."""
        start_s, end_s = ran
        if span.parsed.kind in COMPUTE:
            yield "computing", end_s - start_s
            return
        met_s = min(max([start_s, *(one.start_s for one in self.ran[self.placed.node(span)])]), end_s)
        yield "waiting", met_s - start_s
        yield "communication", end_s - met_s

    def idle(self, gap: Interval, then: Span) -> Iterator[tuple[str, float]]:
        """From when all that the span after it needs has ended, a gap is the host's."""
        start_s, end_s = gap
        needed = [span for node in self.placed.before(self.placed.node(then)) for span in self.ran[node]]
        ready_s = min(max([start_s, *(span.end_s for span in needed)]), end_s)
        moved_s = _covered([(s.start_s, s.end_s) for s in needed if s.parsed.kind in MESSAGES], (start_s, ready_s))
        yield "communication", moved_s
        yield "waiting", ready_s - start_s - moved_s
        yield "host", end_s - ready_s


def _covered(intervals: Iterable[Interval], within: Interval) -> float:
    """Seconds of an interval that others cover."""
    total, reached = 0.0, within[0]
    for start, end in sorted(intervals):
        end = min(end, within[1])
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
