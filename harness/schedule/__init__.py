"""Schedules as data: for each device and queue an ordered list of ops, and which op waits for which.

Nothing else in the project knows the order of operations: planners reason about a `Schedule`, `harness.simulator`
executes it on a described cluster, engines execute it on devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from harness.core.op import Op, Queue
from harness.core.serialization import Document
from harness.core.trace import DeviceQueue
from harness.schedule.dependency_graph import Graph, build_graph
from harness.schedule.policy import RuleName

Dependencies = dict[Op, set[Op]]


@dataclass(frozen=True)
class QueueOps:
    """The ops of one queue of one device, in this order, or in the order in which `rule` picks among the ready ones.

    Every queue executes one op at a time, except "network": only links and ports limit what runs there at once.
    """

    device: int
    name: Queue
    ops: tuple[Op, ...]
    rule: RuleName = "in_order"


@dataclass(frozen=True)
class Schedule(Document):
    """All queues of one training step.

    `devices[j]` is the device of stage j. `loss` says when the last stage may begin its backward passes: after the
    outputs of all micro-batches were gathered, or after each micro-batch's own forward. An op that occupies two queues
    at once (a copy without streams) is listed in both. With a `limit` the first stage begins the forward pass of
    micro-batch i only after the backward pass of micro-batch i - limit (Myelin's pipeline limit). With a `barrier` no
    gradient is reduced, and nothing updated, before the last micro-batch has come back on all stages.

    A schedule describes one pipeline; `replicas` (the data parallel size) copies of it run at the same time: replica
    r's device d is device d + r * (number of devices of the pipeline) of the cluster. A collective op's `part` is
    "ALGORITHM@COMMUNICATOR" or "ALGORITHM@COMMUNICATOR/BUCKET", its algorithm all_reduce, reduce_scatter, all_gather or
    all_to_all. The communicator "data" connects the replicas of the op's device, any other one the devices that have an
    op with the same part and micro-batch. `bytes` is the whole buffer of each member (the gathered one, where that
    differs).

    With `rendezvous` a send and its recv run as one: they begin when both ends are ready, and end together. `tensor` is
    the tensor parallel size: each device represents that many neighbours, which run the same ops, each on its shards;
    `bytes` are those of one of them.

    The messages of each tuple of `message_order` wait for their links in this order: one waits for its link, or takes
    it, only when all messages before it have done so. All other messages wait for their links as soon as they are made.
    """

    queues: tuple[QueueOps, ...]
    devices: tuple[int, ...]
    loss: Literal["gathered", "each"] = "each"
    limit: int | None = None
    replicas: int = 1
    rendezvous: bool = False
    tensor: int = 1
    message_order: tuple[tuple[Op, ...], ...] = ()
    barrier: bool = False

    def ops(self) -> list[Op]:
        """Returns every op once."""
        return list(dict.fromkeys(op for queue in self.queues for op in queue.ops))

    def counterparts(self, device: int) -> list[int]:
        """Returns the cluster's devices that run the same ops as `device` of the pipeline: all replicas and shards."""
        width = max(self.devices) + 1
        return [
            (replica * width + device) * self.tensor + shard
            for replica in range(self.replicas)
            for shard in range(self.tensor)
        ]

    def by_queue(self) -> dict[DeviceQueue, tuple[Op, ...]]:
        """Maps (device, queue) to its ops."""
        return {(queue.device, queue.name): queue.ops for queue in self.queues}

    @cached_property
    def graph(self) -> Graph:
        """What its ops wait for, where messages do not block. Made once: nobody changes it."""
        return build_graph(self)

    def dependencies(self) -> Dependencies:
        """Maps each op to the ops that must end before it starts, in addition to the order within a queue."""
        dependency_graph = self.graph
        barrier_nodes = (
            dependency_graph.before[dependency_graph.barrier] if dependency_graph.barrier is not None else []
        )
        return {
            op: {
                dependency_graph.ops[k]
                for node in nodes
                for k in (barrier_nodes if node == dependency_graph.barrier else [node])
            }
            for op, nodes in zip(dependency_graph.ops, dependency_graph.before, strict=False)
        }

    def text(self) -> str:
        """Writes the schedule as text, one line for each queue."""
        rows = [(f"device {queue.device} {queue.name}", " ".join(map(str, queue.ops))) for queue in self.queues]
        width = max((len(name) for name, _ in rows), default=0)
        return "\n".join(f"{name:<{width}}  {ops}".rstrip() for name, ops in rows)


def collect_queues(placed: Iterable[tuple[DeviceQueue, Op]], rule: RuleName = "in_order") -> tuple[QueueOps, ...]:
    """Collects ops, given in order of issue, into queues; compute queues pick by `rule`."""
    queues: dict[DeviceQueue, list[Op]] = defaultdict(list)
    for queue, op in placed:
        queues[queue].append(op)
    return queues_in_order(queues, {place: rule for place in queues if place[1] == "compute"})


def queues_in_order(
    queues: Mapping[DeviceQueue, Sequence[Op]], rules: Mapping[DeviceQueue, RuleName]
) -> tuple[QueueOps, ...]:
    """Returns the queues of a schedule that have ops: those of each device together, its compute queue first. One
    without a rule has that of its name."""
    ordered = sorted(queues.items(), key=lambda item: (item[0][0], item[0][1] != "compute", item[0][1]))
    named: dict[str, RuleName] = {"network": "fifo"}
    return tuple(
        QueueOps(device, queue, tuple(ops), rules.get((device, queue), named.get(queue, "in_order")))  # type: ignore[arg-type]
        for (device, queue), ops in ordered
        if ops
    )
