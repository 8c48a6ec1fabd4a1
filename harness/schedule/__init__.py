"""Schedules as data: for each device and queue an ordered list of ops, and which op waits for which.

Nothing else in the project knows the order of operations: planners reason about a `Schedule`, `harness.simulate`
executes it on a described cluster, engines execute it on devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from harness.op import Op, Queue
from harness.schedule.graph import graph, sender
from harness.schedule.rule import RuleName
from harness.serial import Document
from harness.trace import Lane, Trace

Dependencies = dict[Op, set[Op]]


@dataclass(frozen=True)
class LaneOps:
    """What one queue of one device executes: in this order, or in the order in which `rule` picks among the ready ones.

    Every queue executes one op at a time, but for "network": there only links and ports limit what runs at once.
    """

    device: int
    queue: Queue
    ops: tuple[Op, ...]
    rule: RuleName = "in_order"


@dataclass(frozen=True)
class Schedule(Document):
    """All lanes of one training step.

    `devices[j]` is the device of stage j. `loss` says when the last stage may begin its backward passes: after the
    outputs of all micro-batches were gathered, or after each micro-batch's own forward. An op that occupies two lanes
    at once (a copy without streams) stands in both. With a `limit` the first stage begins the forward pass of
    micro-batch i only after the backward pass of micro-batch i - limit (Myelin's pipeline limit).

    A schedule is that of one pipeline; `replicas` of it run side by side, all alike: replica r's device d is device
    d + r * (number of devices of the pipeline) of the cluster. A collective op's `part` is "ALGORITHM@COMMUNICATOR" or
    "ALGORITHM@COMMUNICATOR/BUCKET", its algorithm all_reduce, reduce_scatter, all_gather or all_to_all. On the
    communicator "data" the replicas of the op's device meet, on any other one the devices that have an op with the
    same part and micro-batch. `bytes` is the whole buffer of each member (the gathered one, where that differs).

    With `rendezvous` a send and its recv are one: they begin when both ends are there, and end together. With `tensor`
    each device stands for so many neighbours that do the same, each on its shards: `bytes` are those of one of them.

    The messages of each tuple of `in_line` get in line for their links in this order: one waits for its link, or takes
    it, only when all before it have done so. All others get in line as soon as they can leave.
    """

    lanes: tuple[LaneOps, ...]
    devices: tuple[int, ...]
    loss: Literal["gathered", "each"] = "each"
    limit: int | None = None
    replicas: int = 1
    rendezvous: bool = False
    tensor: int = 1
    in_line: tuple[tuple[Op, ...], ...] = ()

    def ops(self) -> list[Op]:
        """Every op once."""
        return list(dict.fromkeys(op for lane in self.lanes for op in lane.ops))

    def alike(self, device: int) -> list[int]:
        """The cluster's devices that do what `device` of the pipeline does."""
        width = max(self.devices) + 1
        return [
            (replica * width + device) * self.tensor + shard
            for replica in range(self.replicas)
            for shard in range(self.tensor)
        ]

    def by_lane(self) -> dict[Lane, tuple[Op, ...]]:
        return {(lane.device, lane.queue): lane.ops for lane in self.lanes}

    def dependencies(self) -> Dependencies:
        """For each op the ops that must have ended before it starts; the order within a lane comes on top."""
        found = graph(self)
        gathered = found.before[found.barrier] if found.barrier is not None else []
        return {
            op: {found.ops[k] for node in nodes for k in (gathered if node == found.barrier else [node])}
            for op, nodes in zip(found.ops, found.before, strict=False)
        }

    def text(self) -> str:
        """A line for each lane: what a schedule looks like."""
        rows = [(f"device {lane.device} {lane.queue}", " ".join(map(str, lane.ops))) for lane in self.lanes]
        width = max((len(name) for name, _ in rows), default=0)
        return "\n".join(f"{name:<{width}}  {ops}".rstrip() for name, ops in rows)


def violations(schedule: Schedule, trace: Trace, tolerance_s: float = 0.0) -> list[str]:
    """What a trace of one step does that its schedule does not allow, or leaves undone; empty if all is well."""
    lanes = trace.lanes()
    found = []
    for lane in schedule.lanes:
        where = f"device {lane.device} {lane.queue}"
        spans = lanes.pop((lane.device, lane.queue), [])
        ran, asked = [span.op for span in spans], [str(op) for op in lane.ops]
        free = lane.rule != "in_order" or lane.queue == "network"
        if (sorted(ran) != sorted(asked)) if free else (ran != asked):
            found.append(f"{where}: the schedule has {' '.join(asked)}, ran {' '.join(ran)}")
        for one, following in pairwise(spans if lane.queue != "network" else ()):
            if following.start_s < one.end_s - tolerance_s:
                found.append(f"{where}: {following.op} started before {one.op} had ended")
    found += [f"device {lane[0]} {lane[1]} is no lane of the schedule" for lane in lanes]
    start: dict[str, float] = {}
    end: dict[str, float] = {}
    for span in trace.spans:
        start[span.op] = min(start.get(span.op, float("inf")), span.start_s)
        end[span.op] = max(end.get(span.op, float("-inf")), span.end_s)
    members = {
        (op.micro_batch, op.part, lane.device): str(op)
        for lane in schedule.lanes
        for op in lane.ops
        if op.kind == "collective"
    }
    for op, before in schedule.dependencies().items():
        for earlier in before:
            place = (earlier.micro_batch, earlier.part, schedule.devices[op.stage])
            name = members.get(place, str(earlier))  # each member of a collective sees its own end
            if schedule.rendezvous and earlier.kind == "send":
                continue  # the recv, in the queue of the task that needs it, tells when it was there
            if str(op) in start and name in end and start[str(op)] < end[name] - tolerance_s:
                found.append(f"{op} started before {earlier} had ended")
    for op in schedule.ops() if schedule.rendezvous else ():
        if op.kind == "recv" and end.get(str(op), 0.0) < start.get(str(sender(op)), float("-inf")) - tolerance_s:
            found.append(f"{op} had ended before {sender(op)} started")
    return found


def lanes_of(placed: Iterable[tuple[Lane, Op]], rule: RuleName = "in_order") -> tuple[LaneOps, ...]:
    """Collect ops, given in the order in which they are issued, into lanes; compute queues pick by `rule`."""
    lanes: dict[Lane, list[Op]] = defaultdict(list)
    for lane, op in placed:
        lanes[lane].append(op)
    ordered = sorted(lanes.items(), key=lambda item: (item[0][0], item[0][1] != "compute", item[0][1]))
    rules: dict[str, RuleName] = {"compute": rule, "network": "fifo"}
    return tuple(
        LaneOps(device, queue, tuple(ops), rules.get(queue, "in_order"))  # type: ignore[arg-type]
        for (device, queue), ops in ordered
    )
