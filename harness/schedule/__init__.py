"""Schedules as data: for each device and queue an ordered list of ops, and which op waits for which.

Nothing else in the project knows the order of operations: planners reason about a `Schedule`, `harness.predict` (and
the simulator) executes it on a described cluster, engines execute it on devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from harness.op import Op, Queue
from harness.serial import Document
from harness.trace import Lane, Trace

Dependencies = dict[Op, set[Op]]


@dataclass(frozen=True)
class LaneOps:
    """What one queue of one device executes, in this order."""

    device: int
    queue: Queue
    ops: tuple[Op, ...]


@dataclass(frozen=True)
class Schedule(Document):
    """All lanes of one training step.

    `devices[j]` is the device of stage j. `loss` says when the last stage may begin its backward passes: after the
    outputs of all micro-batches were gathered, or after each micro-batch's own forward. An op that occupies two lanes
    at once (a copy without streams) stands in both.
    """

    lanes: tuple[LaneOps, ...]
    devices: tuple[int, ...]
    loss: Literal["gathered", "each"] = "each"

    def ops(self) -> list[Op]:
        """Every op once."""
        return list(dict.fromkeys(op for lane in self.lanes for op in lane.ops))

    def by_lane(self) -> dict[Lane, tuple[Op, ...]]:
        return {(lane.device, lane.queue): lane.ops for lane in self.lanes}

    def dependencies(self) -> Dependencies:
        """For each op the ops that must have ended before it starts; the order within a lane comes on top."""
        return _dependencies(self.ops(), len(self.devices), self.loss)

    def text(self) -> str:
        """A line for each lane: what a schedule looks like."""
        rows = [(f"device {lane.device} {lane.queue}", " ".join(map(str, lane.ops))) for lane in self.lanes]
        width = max((len(name) for name, _ in rows), default=0)
        return "\n".join(f"{name:<{width}}  {ops}".rstrip() for name, ops in rows)


def _dependencies(ops: list[Op], stages: int, loss: str) -> Dependencies:
    known = set(ops)
    arrivals: dict[tuple[int, int | None, bool], list[Op]] = defaultdict(list)
    for op in ops:
        if op.kind == "copy":
            arrivals[(op.stage, op.micro_batch, op.forward)].append(op)
    micro_batches = sorted({op.micro_batch for op in ops if op.micro_batch is not None})
    gathered = [Op(stages - 1, "F", i) for i in micro_batches] if loss == "gathered" else []
    found: Dependencies = {}
    for op in ops:
        found[op] = {d for d in _before(op, stages, micro_batches, gathered) if d in known}
        if op.kind in ("F", "B"):
            found[op] |= set(arrivals[(op.stage, op.micro_batch, op.kind == "F")])
    return found


def _before(op: Op, stages: int, micro_batches: list[int], gathered: list[Op]) -> list[Op]:
    """
    F(i, j-1) -> F(i, j) -> ... -> loss -> B(i, n-1) -> ... -> B(i, j+1) -> B(i, j) -> step(j)
                    \\-> R(i, j) -----------------------------------------/
    """
    i, j = op.micro_batch, op.stage
    if op.kind == "copy" and op.peer is not None:
        return [Op(op.peer, "F" if op.forward else "B", i)]
    if op.kind == "F":
        return [Op(j - 1, "F", i)]
    if op.kind == "R":
        return [Op(j, "F", i)]
    if op.kind == "B":
        last = [Op(j, "F", i), *gathered] if j == stages - 1 else []
        return [Op(j, "F", i), Op(j, "R", i), Op(j + 1, "B", i), *last]
    if op.kind == "W":
        return [Op(j, "B", i)]
    if op.kind == "step":
        return [Op(j, kind, i) for i in micro_batches for kind in ("B", "W")]
    return []


def violations(schedule: Schedule, trace: Trace, tolerance_s: float = 0.0) -> list[str]:
    """What a trace of one step does that its schedule does not allow, or leaves undone; empty if all is well."""
    lanes = trace.lanes()
    found = []
    for lane, ops in schedule.by_lane().items():
        spans = lanes.pop(lane, [])
        ran = [span.op for span in spans]
        if ran != [str(op) for op in ops]:
            found.append(f"device {lane[0]} {lane[1]}: the schedule has {' '.join(map(str, ops))}, ran {' '.join(ran)}")
        for one, following in pairwise(spans):
            if following.start_s < one.end_s - tolerance_s:
                found.append(f"device {lane[0]} {lane[1]}: {following.op} started before {one.op} had ended")
    found += [f"device {lane[0]} {lane[1]} is no lane of the schedule" for lane in lanes]
    start: dict[str, float] = {}
    end: dict[str, float] = {}
    for span in trace.spans:
        start[span.op] = min(start.get(span.op, float("inf")), span.start_s)
        end[span.op] = max(end.get(span.op, float("-inf")), span.end_s)
    for op, before in schedule.dependencies().items():
        for earlier in before:
            if str(op) in start and str(earlier) in end and start[str(op)] < end[str(earlier)] - tolerance_s:
                found.append(f"{op} started before {earlier} had ended")
    return found


def lanes_of(placed: Iterable[tuple[Lane, Op]]) -> tuple[LaneOps, ...]:
    """Collect ops, given in the order in which they are issued, into lanes."""
    lanes: dict[Lane, list[Op]] = defaultdict(list)
    for lane, op in placed:
        lanes[lane].append(op)
    ordered = sorted(lanes.items(), key=lambda item: (item[0][0], item[0][1] != "compute", item[0][1]))
    return tuple(LaneOps(device, queue, tuple(ops)) for (device, queue), ops in ordered)  # type: ignore[arg-type]
