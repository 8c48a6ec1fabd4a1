"""The memory timeline of each device: what the ops of an execution allocate and free, and when.

    copy    |== input or skip ================================|      until its stage's backward task ends
    F          |== saved, or checkpoint ======================|      and what it sends, until it has left
    R                                |== saved ===============|
    copy                         |== a skip's gradient =======|
    B                                         |== working ====|      in halves: all that the first one works with
    W                                              |= delayed =|      for the gradients of the weights
    collective                                                |= reducing =|
    first B of an update, step                        |== gradients ==|    where an update frees them
    step                                                     | updating |

Where messages are "posted", "copied" or "kept" (`harness.core.memory_model`), buffers for them are always allocated.

Of two changes at the same moment the free comes first. Where the memory model counts only the inputs of layers, as
MadPipe's does, copies and the working set of a backward task cost nothing, as in that paper.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.op import Op
from harness.core.plan import Plan
from harness.schedule import Schedule
from harness.schedule.dependency_graph import DATA, Graph, split_part
from harness.simulator.stage_bytes import Arriving, HeldBytes, StageBytes, working_bytes

__all__ = ["Kept", "Peak", "kept", "peaks", "working_bytes"]


@dataclass(frozen=True)
class Peak:
    """The peak of one device: when, how many bytes, and of what ("weights", "saved", "checkpoints", ...).

    `reserved` is an estimate of the bytes that a caching allocator of CUDA gets from the driver: it keeps a pool for
    each stream, and what one stream has freed serves no other one. Copies have a stream for each micro-batch where the
    schedule has streams (torchgpipe, section 3.2.3). Unused parts of blocks, and workspaces, are not counted.

        compute stream   |== peak of all but copies ==|
        copy stream 0    |= what arrived of micro-batch 0, forward and back =|
        copy stream 1    |= what arrived of micro-batch 1 =|                       the sum of all peaks
    """

    device: int
    at_s: float
    bytes: int
    contents: dict[str, int] = field(default_factory=dict)
    reserved: int = 0


COMPUTE_POOL = 0
"""The pool of the compute stream; that of the copies of micro-batch i is i + 1."""


@dataclass
class _Changes:
    """The allocations and frees of one device, as columns."""

    at_s: list[float] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    what: list[int] = field(default_factory=list)
    pool: list[int] = field(default_factory=list)

    def hold(self, start_s: float, end_s: float, size: int, what: int, pool: int = COMPUTE_POOL) -> None:
        if size:
            self.pool += (pool, pool)
            self.at_s += (start_s, end_s)
            self.bytes += (size, -size)
            self.what += (what, what)


BEFORE_S = -1.0
"""A time before a step."""
NAMES = (
    *("saved", "checkpoints", "received", "to be sent", "outputs", "working", "reducing"),
    *("gradients of an update", "updating"),
)
SAVED, CHECKPOINTS, RECEIVED, SENT, OUTPUTS, WORKING, REDUCING, GRADIENTS, UPDATING = range(9)
SUMS = (("all_reduce", DATA), ("reduce_scatter", DATA))
"""Collectives that reduce gradients over replicas."""
KEPT_MICRO_BATCHES = 2
"""Micro-batches after which the last stage frees what it received and its gradients, where messages are copied:
DeepSpeed keeps the outputs of two micro-batches, and with them all that they were computed from."""


def peaks(
    graph: Graph,
    start_s: list[float],
    end_s: list[float],
    schedule: Schedule,
    plan: Plan,
    profile: ModelProfile,
    memory: MemoryModel,
) -> tuple[Peak, ...]:
    """Returns the peak of each of `plan.devices`."""
    timeline = _MemoryTimeline(graph, start_s, end_s, schedule, plan, profile, memory)
    timeline.write()
    return tuple(timeline.peak(device) for device in plan.devices)


@dataclass(frozen=True)
class Kept:
    """What a schedule keeps on each device: the bytes of each stage's tasks; what arrives at it in a forward pass, and
    in a backward pass; what is always there on each device."""

    stages: list[StageBytes]
    received: list[int]
    gradients: list[int]
    resident: dict[int, int]


def kept(schedule: Schedule, plan: Plan, profile: ModelProfile, memory: MemoryModel) -> Kept:
    """Returns what the tasks of a plan keep, whatever their order."""
    graph = schedule.graph
    at_once = [0.0] * len(graph.before)
    timeline = _MemoryTimeline(graph, at_once, at_once, schedule, plan, profile, memory)
    received, gradients = (
        [sum(timeline.messages(number, forward).values()) for number in range(len(plan.stages))]
        for forward in (True, False)
    )
    return Kept(timeline.stages, received, gradients, {d: sum(timeline.resident(d).values()) for d in plan.devices})


class _MemoryTimeline(HeldBytes):
    def __init__(
        self,
        graph: Graph,
        start_s: list[float],
        end_s: list[float],
        schedule: Schedule,
        plan: Plan,
        profile: ModelProfile,
        memory: MemoryModel,
    ) -> None:
        self.graph, self.start_s, self.end_s = graph, start_s, end_s
        super().__init__(schedule, plan, profile, memory, _arriving(graph))
        self.passing = memory.messages in ("passing", "posted")
        self.last_s = max(end_s, default=0.0)
        self.changes_of = {device: _Changes() for device in plan.devices}
        self.backward = {(op.stage, op.micro_batch): node for node, op in enumerate(graph.ops) if op.kind == "B"}
        self.forward = {(op.stage, op.micro_batch): node for node, op in enumerate(graph.ops) if op.kind == "F"}
        self.weights = {(op.stage, op.micro_batch): node for node, op in enumerate(graph.ops) if op.kind == "W"}
        self.first_backward = {  # of each stage, which finds no gradients
            min(nodes, key=lambda node: start_s[node]) for nodes in _by_stage(graph, "B").values()
        }
        self.first_of_update: dict[int, int] = {}  # the first backward task of each update
        for stage, nodes in _by_stage(graph, "step").items() if memory.freed else ():
            begin = 0
            for node in sorted(nodes, key=lambda node: graph.ops[node].micro_batch or 0):
                self.first_of_update[node] = self.backward[stage, begin]
                begin = (graph.ops[node].micro_batch or 0) + 1
        self.first_backward |= set(self.first_of_update.values())
        self.streams = any(queue.name == "copy in" and between_devices(queue.ops) for queue in schedule.queues)
        self.recomputed = {(op.stage, op.micro_batch) for op in graph.ops if op.kind == "R"}

    def write(self) -> None:
        for node, op in enumerate(self.graph.ops):
            kind = op.kind
            if kind in ("F", "R"):
                self.task(node, op)
            elif kind in ("copy", "send") and op.peer is not None and self.whole:
                self.message(node, op)
            elif kind == "B" and self.whole:
                self.changes(op.stage).hold(self.start_s[node], self.end_s[node], self.working(node, op), WORKING)
                if self.memory.messages in ("copied", "posted"):
                    # gradients of skips: in addition to their buffers, or until the task has ended and they are sent
                    arriving = self.messages(op.stage, self.memory.messages == "posted")
                    skips = sum(size for part, size in arriving.items() if part)
                    self.changes(op.stage).hold(self.start_s[node], self.end_s[node], skips, RECEIVED)
                later = self.end_s[self.weights.get((op.stage, op.micro_batch), node)]
                self.changes(op.stage).hold(self.end_s[node], later, self.stages[op.stage].delayed, WORKING)
            elif kind == "W" and self.whole and not self.has_input_gradient(op.stage):  # the whole backward pass
                working = self.stages[op.stage].working
                self.changes(op.stage).hold(self.start_s[node], self.end_s[node], working, WORKING)
            elif kind == "collective" and split_part(op.part) in SUMS:
                size = self.reducing(op.stage)
                self.changes(op.stage).hold(self.start_s[node], self.end_s[node], size, REDUCING)
            elif node in self.first_of_update and self.whole:
                start, end, sizes = self.end_s[self.first_of_update[node]], self.end_s[node], self.stages[op.stage]
                self.changes(op.stage).hold(start, end, sizes.gradients, GRADIENTS)
                self.changes(op.stage).hold(self.start_s[node], end, sizes.updating, UPDATING)

        for number in range(len(self.plan.stages)):
            self.changes(number).hold(BEFORE_S, 0.0, self.rebuilt(number), REDUCING)

    def working(self, node: int, op: Op) -> int:
        """Returns what a backward pass works with, or its half for the inputs."""
        sizes = self.stages[op.stage]
        if (op.stage, op.micro_batch) in self.weights:
            return sizes.inputs_working
        return sizes.first_working if node in self.first_backward else sizes.working

    def changes(self, stage: int) -> _Changes:
        return self.changes_of[self.plan.stages[stage].device]

    def task(self, node: int, op: Op) -> None:
        """Adds what a forward task or recomputation keeps until the backward task, and that of the weights, have
        ended."""
        place = (op.stage, op.micro_batch)
        start, end = self.start_s[node], self.end_s[self.backward.get(place, node)]
        end = max(end, self.end_s[self.weights.get(place, node)])
        sizes, changes = self.stages[op.stage], self.changes(op.stage)
        if op.kind == "F":
            changes.hold(start, end, sizes.outputs, OUTPUTS)
            if place in self.recomputed:
                changes.hold(start, end, sizes.checkpoint, CHECKPOINTS)
                return
            if self.memory.messages == "copied":
                changes.hold(start, self.end_s[node], sum(self.messages(op.stage, True).values()), RECEIVED)
        changes.hold(start, end, sizes.saved, SAVED)

    def message(self, node: int, op: Op) -> None:
        """Adds the buffers of a message. The receiver keeps it until the end of the backward task that uses it, a
        boundary's gradient only until that task begins, whose working set replaces it. The sender keeps it until it is
        sent."""
        assert op.peer is not None
        target, source = (op.stage, op.peer) if op.kind == "copy" else (op.peer, op.stage)
        forward, end = op.forward, self.end_s[node]
        place = (target, op.micro_batch)
        once = forward and self.used_once(target, op.part) and place not in self.recomputed
        user = (self.forward if once else self.backward).get(place, node)
        until = self.end_s[user] if forward or op.part else self.start_s[user]
        if self.passing or (self.memory.messages == "copied" and forward):
            pool = (op.micro_batch or 0) + 1 if self.streams else COMPUTE_POOL
            until = max(until, end, self.freed_at(target, op))
            self.changes(target).hold(self.start_s[node], until, op.bytes, RECEIVED, pool)
        made = self.sent_from(node, source, op)
        end = max(end, self.kept_until(source, op))
        if made < end:
            self.changes(source).hold(made, end, op.bytes, SENT)

    def sent_from(self, node: int, stage: int, op: Op) -> float:
        """Returns when the buffer of what `stage` sends begins: after the backward task for a skip that the task
        saves."""
        place = (stage, op.micro_batch)
        copied = self.memory.messages == "copied" and op.part in self.messages(
            stage, True
        )  # a skip that passes through
        saved = op.forward and bool(op.part) and place not in self.recomputed and not copied
        return self.end_s[(self.forward if op.forward and not saved else self.backward).get(place, node)]

    def kept_until(self, stage: int, op: Op) -> float:
        """Returns until when `stage` keeps what it has sent.

        Libraries that keep their buffers wait for their sends at the end of the step, where devices have several
        stages.
        """
        if self.memory.messages == "kept" and len(self.plan.stages) > len(self.plan.devices):
            return 0.0 if op.part in self.messages(stage, op.forward) else self.last_s
        user = self.backward.get((stage, op.micro_batch))
        if not self.passing and op.forward and user is not None:
            return self.start_s[user]
        return 0.0 if op.forward else self.freed_at(stage, op)

    def freed_at(self, stage: int, op: Op) -> float:
        """Returns when the last stage frees what it received, and the gradients, of the micro-batch of a message."""
        if self.memory.messages != "copied" or stage != len(self.plan.stages) - 1 or op.micro_batch is None:
            return 0.0
        later = self.forward.get((stage, op.micro_batch + KEPT_MICRO_BATCHES))
        return self.last_s if later is None else self.end_s[later]

    def peak(self, device: int) -> Peak:
        """Returns the peak of a device. Of changes at the same moment the free comes first."""
        resident, changes = self.resident(device), self.changes_of[device]
        base = sum(resident.values())
        if not changes.at_s:
            return Peak(device, 0.0, base, without_zeros(resident), base)
        at_s, change, what = np.array(changes.at_s), np.array(changes.bytes, dtype=np.int64), np.array(changes.what)
        order = np.lexsort((change > 0, at_s))
        live = np.cumsum(change[order])
        highest = int(np.argmax(live))
        until_peak = order[: highest + 1]
        parts = {name: int(change[until_peak][what[until_peak] == code].sum()) for code, name in enumerate(NAMES)}
        pools = np.array(changes.pool)[order]
        reserved = sum(int(np.cumsum(change[order][pools == pool]).max()) for pool in np.unique(pools))
        held = base + int(live[highest])
        return Peak(
            device, max(0.0, float(at_s[order[highest]])), held, without_zeros(resident | parts), base + reserved
        )


def between_devices(ops: Sequence[Op]) -> bool:
    """Whether copies of a queue bring messages of other stages: others are of the optimizer's state."""
    return any(op.peer is not None for op in ops)


def _arriving(graph: Graph) -> Arriving:
    found: Arriving = defaultdict(dict)
    for op in graph.ops:
        if op.kind in ("copy", "send") and op.peer is not None:
            found[op.stage if op.kind == "copy" else op.peer, op.forward][op.part] = op.bytes
    return found


def _by_stage(graph: Graph, kind: str) -> dict[int, list[int]]:
    nodes_of: dict[int, list[int]] = defaultdict(list)
    for node, op in enumerate(graph.ops):
        if op.kind == kind:
            nodes_of[op.stage].append(node)
    return nodes_of


def without_zeros(parts: dict[str, int]) -> dict[str, int]:
    return {name: size for name, size in parts.items() if size}
