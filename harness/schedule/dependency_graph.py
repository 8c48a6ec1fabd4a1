"""A schedule on integer indices: what the simulator executes, in time linear in the number of ops."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from harness.core.op import Op
from harness.schedule.optimizer_chunks import Chunks

if TYPE_CHECKING:
    from harness.schedule import QueueOps, Schedule

MESSAGES = ("copy", "send", "recv")
DATA = "data"
"""The communicator of the replicas of a device."""
TIED = "tied"
"""The communicator of the devices of one pipeline that keep a copy of the same parameter."""
COPIES = "copies"
"""The communicator of all devices that keep a copy of the same parameter, those of all replicas at once."""
REDUCING = {
    (algorithm, communicator) for algorithm in ("all_reduce", "reduce_scatter") for communicator in (DATA, TIED, COPIES)
}
"""Collectives that reduce gradients."""


@dataclass
class Graph:
    """Nodes 0..len(ops)-1. `before[k]` are the nodes that must end before node k starts; queue orders come on top.

    A node that is listed in several queues occupies all of them: the two ends of a copy without streams, the members of
    a collective, with `rendezvous` a send and its receive. `queues` holds for each queue of the schedule its nodes.
    `barrier`, if there is one, is a node without an op: all outputs are gathered.
    """

    ops: list[Op] = field(default_factory=list)
    queues: list[list[int]] = field(default_factory=list)
    before: list[list[int]] = field(default_factory=list)
    barrier: int | None = None


def build_graph(schedule: Schedule, blocking: bool = False) -> Graph:
    """Builds the graph of a schedule; with `blocking` every send is a rendezvous.

    Raises ValueError for an op that is listed twice in one queue."""
    result = Graph()
    index = _number(schedule, result, blocking or schedule.rendezvous)
    _Edges(schedule, result, index).draw()
    return result


@cache
def split_part(part: str) -> tuple[str, str]:
    """Splits a collective's `part`, such as "all_reduce@data/bucket3", into (algorithm, communicator)."""
    algorithm, _, rest = part.partition("@")
    return algorithm, rest.partition("/")[0]


def chains(queue: QueueOps, nodes: list[int]) -> list[list[int]]:
    """Lists the nodes that run one after the other in a queue: all, or in the network those of each communicator."""
    if queue.name != "network":
        return [nodes] if queue.rule == "in_order" else []
    by_communicator: dict[str, list[int]] = {}
    for op, node in zip(queue.ops, nodes, strict=True):
        if op.kind == "collective":
            by_communicator.setdefault(split_part(op.part)[1], []).append(node)
    return list(by_communicator.values())


Key = tuple[object, ...]


def node_key(op: Op, rendezvous: bool) -> Key:
    """Returns the identity of a node: entries of queues with the same key are one node."""
    kind = op.kind
    if kind == "collective":
        shared = split_part(op.part)[1] != DATA
        return (kind, op.micro_batch, op.part) if shared else (kind, op.micro_batch, op.part, op.stage)
    if kind == "step":
        return (kind, op.stage, op.micro_batch, op.part)
    if kind not in MESSAGES:
        return (kind, op.stage, op.micro_batch)
    if rendezvous and kind == "recv":
        return ("send", op.peer, op.micro_batch, op.part, op.stage)
    return (kind, op.stage, op.micro_batch, op.part, op.peer)


def sender(op: Op) -> Op:
    """Returns the send of a receive."""
    assert op.peer is not None
    return Op(op.peer, "send", op.micro_batch, op.part, op.stage, op.bytes, op.queue)


def _number(schedule: Schedule, graph: Graph, rendezvous: bool) -> dict[Key, int]:
    index: dict[Key, int] = {}
    ops = graph.ops
    for queue in schedule.queues:
        nodes = []
        for op in queue.ops:
            key = node_key(op, rendezvous)
            node = index.setdefault(key, len(ops))
            if node == len(ops):
                ops.append(sender(op) if rendezvous and op.kind == "recv" else op)
            nodes.append(node)
        if len(set(nodes)) < len(nodes):
            repeated = next(ops[node] for place, node in enumerate(nodes) if node in nodes[:place])
            where = f"device {queue.device} {queue.name}"
            raise ValueError(f"{where}: {repeated} of stage {repeated.stage} is listed twice -> once")
        graph.queues.append(nodes)
    return index


@dataclass
class _Edges:
    """
    F(i, j-1) -> F(i, j) -> ... -> loss -> B(i, n-1) -> ... -> B(i, j+1) -> B(i, j) -> W(i, j) -> step(j)
                    \\-> R(i, j) -----------------------------------------/
    A message starts when the task that made it has ended; the task that needs it waits for it. Where a rule picks, a
    recomputation waits for what its backward task waits for; in a fixed order its position decides when it runs.
    """

    schedule: Schedule
    graph: Graph
    index: dict[Key, int]
    ruled: set[int] = field(default_factory=set)  # stages without a fixed order

    def draw(self) -> None:
        arrivals = self.arrivals()
        queues = (queue for queue in self.schedule.queues if queue.name == "compute" and queue.rule != "in_order")
        self.ruled = {op.stage for queue in queues for op in queue.ops}
        self.graph.before = [self.dependencies(op, arrivals) for op in self.graph.ops]
        if self.schedule.loss == "gathered":
            self.gather()
        self.reductions()

    def arrivals(self) -> dict[tuple[int, int | None, bool], list[int]]:
        """Maps each task (stage, micro-batch, forward) to the messages that it waits for."""
        by_task: dict[tuple[int, int | None, bool], list[int]] = defaultdict(list)
        for node, op in enumerate(self.graph.ops):
            if op.peer is None:
                continue
            if op.kind in ("copy", "recv"):
                by_task[op.stage, op.micro_batch, op.peer < op.stage].append(node)
            elif op.kind == "send" and ("recv", op.peer, op.micro_batch, op.part, op.stage) not in self.index:
                by_task[op.peer, op.micro_batch, op.stage < op.peer].append(node)  # a rendezvous, or nobody receives
        return by_task

    def dependencies(self, op: Op, arrivals: dict[tuple[int, int | None, bool], list[int]]) -> list[int]:
        get, kind, i, j = self.index.get, op.kind, op.micro_batch, op.stage
        if kind == "F":
            tasks = [get(("F", j - 1, i))] if j else self.injected(i)
            return self.existing(tasks) + arrivals.get((j, i, True), [])
        if kind == "B":
            tasks = [get(("F", j, i)), get(("R", j, i)), get(("B", j + 1, i))]
            return self.existing(tasks) + arrivals.get((j, i, False), [])
        if kind == "R" and j in self.ruled:
            return self.existing([get(("F", j, i)), get(("B", j + 1, i))]) + arrivals.get((j, i, False), [])
        if kind == "R":
            return self.existing([get(("F", j, i))])
        if kind == "W":
            return self.existing([get(("B", j, i))])
        if kind == "copy" and op.peer is not None:
            return self.existing([get(("F" if op.peer < j else "B", op.peer, i))])
        if kind == "send" and op.peer is not None:
            return self.existing([get(("F" if op.peer > j else "B", j, i))])
        if kind == "recv":
            return self.existing([get(("send", op.peer, i, op.part, j))])
        return []

    def injected(self, i: int | None) -> list[int | None]:
        """With a limit the first stage begins micro-batch i after the backward pass of micro-batch i - limit."""
        limit = self.schedule.limit
        return [] if limit is None or i is None else [self.index.get(("B", 0, i - limit))]

    @staticmethod
    def existing(nodes: Sequence[int | None]) -> list[int]:
        return [node for node in nodes if node is not None]

    def gather(self) -> None:
        """All forward tasks of the last stage -> barrier -> each of its backward tasks."""
        last = len(self.schedule.devices) - 1
        ops, before = self.graph.ops, self.graph.before
        forward = [node for node, op in enumerate(ops) if op.kind == "F" and op.stage == last]
        self.graph.barrier = len(ops)
        for node, op in enumerate(ops):
            if op.kind == "B" and op.stage == last:
                before[node].append(self.graph.barrier)
        before.append(forward)

    def reductions(self) -> None:
        """B, W -> all_reduce, reduce_scatter over the replicas -> over copies of a parameter -> step.

        Other collectives wait for their turn only. A reduction with a micro-batch waits for the gradients of that one,
        any other for those of all. A step with a micro-batch waits for the gradients up to that one, and for the
        previous step. A queue in a fixed order may reduce over copies before replicas, as DeepSpeed does: the result is
        the same up to rounding. The all-reduces of chunks follow those over copies
        (`harness.schedule.optimizer_chunks`), and leave out what these reduce over all replicas.
        """
        gradients: dict[tuple[int, int | None], list[int]] = defaultdict(list)
        over_replicas: dict[int, list[int]] = defaultdict(list)
        over_copies: dict[int, list[int]] = defaultdict(list)
        ties: set[int] = set()
        before = self.graph.before
        chunks = Chunks(self.graph.ops)
        for node, op in enumerate(self.graph.ops):
            if op.kind in ("B", "W"):
                gradients[op.stage, op.micro_batch].append(node)
                gradients[op.stage, None].append(node)
            elif op.kind == "collective" and split_part(op.part) in REDUCING:
                if split_part(op.part)[1] != DATA:
                    ties.add(node)
                elif not chunks.add_reduction(node):
                    over_replicas[op.stage].append(node)
        if self.schedule.barrier:
            self.wait_for_all_stages(gradients)
        for nodes in over_replicas.values():
            for node in nodes:
                op = self.graph.ops[node]
                before[node] += gradients[op.stage, op.micro_batch]
        for node, stages in self.members(ties).items():
            later = self.later(node)
            for stage in stages:
                before[node] += gradients[stage, None] + [
                    reduction for reduction in over_replicas[stage] if reduction not in later
                ]
                over_copies[stage].append(node)
        steps: dict[int, list[int]] = defaultdict(list)
        for node, op in enumerate(self.graph.ops):
            if op.kind != "step" or op.part:
                continue
            if op.micro_batch is None:
                before[node] += gradients[op.stage, None] + over_replicas[op.stage] + over_copies[op.stage]
            else:
                steps[op.stage].append(node)
        for stage, nodes in steps.items():
            self.updates(stage, nodes, gradients)
        chunks.draw(before, lambda stage: gradients[stage, None] + over_replicas[stage] + over_copies[stage])

    def wait_for_all_stages(self, gradients: dict[tuple[int, int | None], list[int]]) -> None:
        """Adds the last gradients of all stages to what the complete ones of each stage are."""
        stages = [stage for stage, i in gradients if i is None]
        last = max((i for _, i in gradients if i is not None), default=0)
        ends = [node for stage in stages for node in gradients.get((stage, last), [])]
        for stage in stages:
            gradients[stage, None] += [node for node in ends if self.graph.ops[node].stage != stage]

    def updates(self, stage: int, steps: list[int], gradients: dict[tuple[int, int | None], list[int]]) -> None:
        """The optimizer's steps of a stage, each named by its last micro-batch.

        B(0, j), B(1, j) -> step(1, j) -> step(3, j)
                      B(2, j), B(3, j) --/
        """
        done: list[int] = []
        first = 0
        for i, node in sorted((self.graph.ops[node].micro_batch or 0, node) for node in steps):
            new = [gradient for k in range(first, i + 1) for gradient in gradients[stage, k]]
            self.graph.before[node] += done + new
            done, first = [node], i + 1

    def later(self, node: int) -> set[int]:
        """Returns what follows a node in its queues with a fixed order."""
        following: set[int] = set()
        for queue, nodes in zip(self.schedule.queues, self.graph.queues, strict=True):
            if queue.name != "network" and queue.rule == "in_order" and node in nodes:
                following.update(nodes[nodes.index(node) + 1 :])
        return following

    def members(self, ties: set[int]) -> dict[int, list[int]]:
        """Maps each all-reduce over copies of a parameter to all stages on the devices that take part."""
        stages_of: dict[int, list[int]] = {node: [] for node in ties}
        for queue, nodes in zip(self.schedule.queues, self.graph.queues, strict=True):
            for node in ties.intersection(nodes):
                stages_of[node] += [j for j, device in enumerate(self.schedule.devices) if device == queue.device]
        return stages_of
