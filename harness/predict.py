"""What a schedule costs on a described cluster: step time, and the peak memory of each device.

The schedule that the engine will execute is executed here with the profile's durations, in the order of each lane:

    device 0 compute   0F0 0F1          0B1    0B0
    device 1 compute       1F0 1F1 1B1    1B0            1B1 waits for 1F1, 0B1 for 1B1

Each op starts when its lanes are free and all that it depends on has ended. Links are not shared: every copy has its
link for itself.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

from harness.cluster import Cluster
from harness.ledger import peak_memory_bytes
from harness.memory import MemoryModel
from harness.op import Op
from harness.plan import Plan
from harness.profile import ModelProfile
from harness.schedule import Schedule
from harness.trace import Lane, Span, Trace


class Deadlock(RuntimeError):
    """A schedule that cannot go on: the message names, for each lane, which op waits for what."""


def predict(
    schedule: Schedule, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel
) -> tuple[dict[str, Any], Trace]:
    """One step of `schedule`, as figures and as a trace that begins at 0.

    The figures: `step_time_s`; for each of `plan.devices` `peak_memory_bytes` and `utilization`; `bubble_fraction`.
    Raises `Deadlock` where the schedule cannot end.
    """
    durations = {op: duration(op, plan, profile, cluster, memory) for op in schedule.ops()}
    spans = _Execution(schedule, durations).run()
    trace = Trace(tuple(spans), ((0.0, max(span.end_s for span in spans)),))
    utilization = trace.utilization(plan.devices)
    return {
        "step_time_s": trace.window_s,
        "peak_memory_bytes": peak_memory_bytes(trace, schedule, plan, profile, memory),
        "utilization": utilization,
        "bubble_fraction": 1 - sum(utilization) / len(utilization),
    }, trace


def duration(op: Op, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> float:
    """Seconds of one op. The optimizer reads gradients, and reads and writes weights and its own state."""
    stage = plan.stages[op.stage]
    if op.kind in ("F", "R"):
        return profile.sum("forward_s", stage.first, stage.last)
    if op.kind == "B":
        return profile.sum("backward_s", stage.first, stage.last)
    if op.kind == "copy" and op.peer is not None:
        return cluster.link(plan.stages[op.peer].device, stage.device).seconds(op.bytes)
    if op.kind == "step":
        touched = 2 * memory.weights + memory.gradients + 2 * memory.optimizer
        size = profile.sum("param_bytes", stage.first, stage.last) * touched
        return size / cluster.device.memory_bandwidth if cluster.device.memory_bandwidth else 0.0
    raise ValueError(f"{op}: the prediction knows no cost for an op of kind {op.kind!r}")


class _Execution:
    """Spans of all ops: a lane goes on for as long as its next op can start, then the next lane has its turn."""

    def __init__(self, schedule: Schedule, durations: dict[Op, float]) -> None:
        self.waits, self.durations = schedule.dependencies(), durations
        self.todo = {lane: deque(ops) for lane, ops in schedule.by_lane().items()}
        self.homes: dict[Op, list[Lane]] = defaultdict(list)  # an op may stand in two lanes: it occupies both
        for lane, ops in self.todo.items():
            for op in ops:
                self.homes[op].append(lane)
        self.free = dict.fromkeys(self.todo, 0.0)
        self.end: dict[Op, float] = {}
        self.spans: list[Span] = []

    def run(self) -> list[Span]:
        progress = True
        while progress:
            progress = False
            for ops in self.todo.values():
                while ops and self.ready(ops[0]):
                    self.start(ops[0])
                    progress = True
        if any(self.todo.values()):
            raise Deadlock("the schedule cannot go on:\n" + "\n".join(self.stuck()))
        return self.spans

    def ready(self, op: Op) -> bool:
        """Whether all that `op` waits for has ended, and it is the next one in every lane that it occupies."""
        next_in_all = all(self.todo[lane] and self.todo[lane][0] == op for lane in self.homes[op])
        return next_in_all and self.waits[op] <= self.end.keys()

    def start(self, op: Op) -> None:
        begin = max([self.free[lane] for lane in self.homes[op]] + [self.end[earlier] for earlier in self.waits[op]])
        self.end[op] = begin + self.durations[op]
        for lane in self.homes[op]:
            self.todo[lane].popleft()
            self.free[lane] = self.end[op]
            self.spans.append(Span(str(op), lane[0], lane[1], begin, self.end[op]))

    def stuck(self) -> Iterator[str]:
        """For each lane with work left, who waits for what."""
        for (device, queue), ops in self.todo.items():
            if ops:
                missing = ", ".join(sorted(str(earlier) for earlier in self.waits[ops[0]] - self.end.keys()))
                yield f"  device {device} {queue}: {ops[0]} waits for {missing or 'its turn in another lane'}"
