"""The memory timeline of `harness.simulator.memory_timeline`, on columns: the rules of that module for all
micro-batches of a template at once.

Where a method has the name of one there it does the same, with `node` for all nodes of a template.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.op import Op
from harness.core.plan import Plan
from harness.schedule import Schedule
from harness.schedule.dependency_graph import split_part
from harness.simulator.compiled.columns import Columns
from harness.simulator.compiled.fullest import fullest
from harness.simulator.compiled.tables import Flags, Numbers, Seconds
from harness.simulator.memory_timeline import (
    BEFORE_S,
    CHECKPOINTS,
    COMPUTE_POOL,
    GRADIENTS,
    KEPT_MICRO_BATCHES,
    NAMES,
    OUTPUTS,
    RECEIVED,
    REDUCING,
    SAVED,
    SENT,
    SUMS,
    UPDATING,
    WORKING,
    Peak,
    between_devices,
    without_zeros,
)
from harness.simulator.stage_bytes import Arriving, HeldBytes


class Held(NamedTuple):
    """What nodes of a template hold on a device: each from a `start_s` to an `end_s`, `size` bytes."""

    start_s: Seconds
    end_s: Seconds
    size: int
    what: int
    pool: Numbers


def peaks(
    columns: Columns,
    start_s: Seconds,
    end_s: Seconds,
    schedule: Schedule,
    plan: Plan,
    profile: ModelProfile,
    memory: MemoryModel,
) -> tuple[Peak, ...]:
    """Returns the peak of each of `plan.devices`."""
    timeline = _MemoryTimeline(columns, start_s, end_s, schedule, plan, profile, memory)
    timeline.write()
    return tuple(timeline.peak(device) for device in plan.devices)


class _MemoryTimeline(HeldBytes):
    def __init__(
        self,
        columns: Columns,
        start_s: Seconds,
        end_s: Seconds,
        schedule: Schedule,
        plan: Plan,
        profile: ModelProfile,
        memory: MemoryModel,
    ) -> None:
        self.columns, self.start_s, self.end_s = columns, start_s, end_s
        small = np.min_scalar_type(len(columns.templates))  # such numbers are sorted much faster
        order = np.argsort(columns.template.astype(small), kind="stable")
        ends = np.cumsum(np.bincount(columns.template, minlength=len(columns.templates)))
        self.nodes = np.split(order, ends[:-1])  # of each template
        super().__init__(schedule, plan, profile, memory, self.arrivals())
        self.passing = memory.messages in ("passing", "posted")
        self.last_s = float(end_s.max())
        self.held: dict[int, list[Held]] = defaultdict(list)
        self.streams = any(queue.name == "copy in" and between_devices(queue.ops) for queue in schedule.queues)

    def arrivals(self) -> Arriving:
        """Returns what arrives at each stage; of messages of several sizes the last one counts."""
        found: Arriving = defaultdict(dict)
        used = [(nodes[-1], op) for nodes, op in zip(self.nodes, self.columns.templates, strict=True) if len(nodes)]
        for _, op in sorted(used, key=lambda one: int(one[0])):
            if op.kind in ("copy", "send") and op.peer is not None:
                found[op.stage if op.kind == "copy" else op.peer, op.forward][op.part] = op.bytes
        return found

    def write(self) -> None:
        for op, node in zip(self.columns.templates, self.nodes, strict=True):
            kind = op.kind
            if kind in ("F", "R"):
                self.task(node, op)
            elif kind in ("copy", "send") and op.peer is not None and self.whole:
                self.message(node, op)
            elif kind == "B" and self.whole:
                self.backward_task(node, op)
            elif kind == "W" and self.whole and not self.has_input_gradient(op.stage):
                self.hold(op.stage, self.start_s[node], self.end_s[node], self.stages[op.stage].working, WORKING)
            elif kind == "collective" and split_part(op.part) in SUMS:
                self.hold(op.stage, self.start_s[node], self.end_s[node], self.reducing(op.stage), REDUCING)
            elif kind == "step" and self.memory.freed and self.whole:
                sizes, end = self.stages[op.stage], self.end_s[np.sort(node)]
                self.hold(op.stage, self.end_s[self.first_of_update(op.stage)], end, sizes.gradients, GRADIENTS)
                self.hold(op.stage, self.start_s[np.sort(node)], end, sizes.updating, UPDATING)

        for number in range(len(self.plan.stages)):
            self.hold(number, np.array([BEFORE_S]), np.zeros(1), self.rebuilt(number), REDUCING)

    def first_of_update(self, stage: int) -> Numbers:
        """Returns the first backward task of each update of a stage, in the order of these."""
        steps = self.columns.nodes([self.columns.identity("step", stage, None)])
        begins = np.concatenate([[1], np.sort(self.columns.column[steps])[:-1] + 1])
        found: Numbers = self.columns.table[self.columns.identity("B", stage, None), begins]
        return found

    def hold(
        self, stage: int, start_s: Seconds, end_s: Seconds, size: int, what: int, pool: Numbers | None = None
    ) -> None:
        if size and len(start_s):
            pool = np.full(len(start_s), COMPUTE_POOL) if pool is None else pool
            self.held[self.plan.stages[stage].device].append(Held(start_s, end_s, size, what, pool))

    def of(self, kind: str, stage: int, node: Numbers, later: int = 0) -> Numbers:
        """Returns the tasks of a stage for the micro-batches of nodes, or those `later`; -1 where there is none."""
        row, column = self.columns.identity(kind, stage, None), self.columns.column[node] + later
        if row < 0:
            return np.full(len(node), -1)
        table = self.columns.table
        there = column < table.shape[1]
        return np.where(there, table[row, np.where(there, column, 0)], -1)

    @staticmethod
    def at(seconds: Seconds, tasks: Numbers, otherwise: Seconds | float) -> Seconds:
        """Returns the times of tasks, or others where there is none."""
        return np.where(tasks >= 0, seconds[tasks], otherwise)

    def backward_task(self, node: Numbers, op: Op) -> None:
        start, end, sizes = self.start_s[node], self.end_s[node], self.stages[op.stage]
        weights = self.of("W", op.stage, node)
        tasks = np.sort(self.columns.nodes([self.columns.identity("B", op.stage, None)]))
        firsts = tasks[[np.argmin(self.start_s[tasks])]]
        if self.memory.freed:
            firsts = np.union1d(firsts, self.first_of_update(op.stage))
        first = np.isin(node, firsts)
        for chosen, size in (
            (weights >= 0, sizes.inputs_working),
            ((weights < 0) & first, sizes.first_working),
            ((weights < 0) & ~first, sizes.working),
        ):
            self.hold(op.stage, start[chosen], end[chosen], size, WORKING)
        if self.memory.messages in ("copied", "posted"):
            arriving = self.messages(op.stage, self.memory.messages == "posted")
            self.hold(op.stage, start, end, sum(size for part, size in arriving.items() if part), RECEIVED)
        self.hold(op.stage, end, self.at(self.end_s, weights, end), sizes.delayed, WORKING)

    def task(self, node: Numbers, op: Op) -> None:
        start, own_end, sizes, stage = self.start_s[node], self.end_s[node], self.stages[op.stage], op.stage
        end = self.at(self.end_s, self.of("B", stage, node), own_end)
        end = np.maximum(end, self.at(self.end_s, self.of("W", stage, node), own_end))
        if op.kind == "F":
            self.hold(stage, start, end, sizes.outputs, OUTPUTS)
            again = self.recomputed(stage, node)
            self.hold(stage, start[again], end[again], sizes.checkpoint, CHECKPOINTS)
            start, end, own_end = start[~again], end[~again], own_end[~again]
            if self.memory.messages == "copied":
                self.hold(stage, start, own_end, sum(self.messages(stage, True).values()), RECEIVED)
        self.hold(stage, start, end, sizes.saved, SAVED)

    def recomputed(self, stage: int, node: Numbers) -> Flags:
        found: Flags = self.of("R", stage, node) >= 0
        return found

    def message(self, node: Numbers, op: Op) -> None:
        assert op.peer is not None
        target, source = (op.stage, op.peer) if op.kind == "copy" else (op.peer, op.stage)
        forward, start, end = op.forward, self.start_s[node], self.end_s[node]
        user = self.of("B", target, node)
        if forward and self.used_once(target, op.part):
            user = np.where(self.recomputed(target, node), user, self.of("F", target, node))
        until = self.at(self.end_s, user, end) if forward or op.part else self.at(self.start_s, user, start)
        if self.passing or (self.memory.messages == "copied" and forward):
            pool = np.maximum(self.columns.column[node], 1) if self.streams else None
            until = np.maximum(np.maximum(until, end), self.freed_at(target, node))
            self.hold(target, start, until, op.bytes, RECEIVED, pool)
        made = self.sent_from(node, source, op)
        end = np.maximum(end, self.kept_until(source, node, op))
        sent = made < end
        self.hold(source, made[sent], end[sent], op.bytes, SENT)

    def sent_from(self, node: Numbers, stage: int, op: Op) -> Seconds:
        backward = self.at(self.end_s, self.of("B", stage, node), self.end_s[node])
        if not op.forward:
            return backward
        copied = self.memory.messages == "copied" and op.part in self.messages(stage, True)
        saved = ~self.recomputed(stage, node) & (bool(op.part) and not copied)
        return np.where(saved, backward, self.at(self.end_s, self.of("F", stage, node), self.end_s[node]))

    def kept_until(self, stage: int, node: Numbers, op: Op) -> Seconds | float:
        if self.memory.messages == "kept" and len(self.plan.stages) > len(self.plan.devices):
            return 0.0 if op.part in self.messages(stage, op.forward) else self.last_s
        if not op.forward:
            return self.freed_at(stage, node)
        return 0.0 if self.passing else self.at(self.start_s, self.of("B", stage, node), 0.0)

    def freed_at(self, stage: int, node: Numbers) -> Seconds | float:
        if self.memory.messages != "copied" or stage != len(self.plan.stages) - 1:
            return 0.0
        later = self.at(self.end_s, self.of("F", stage, node, KEPT_MICRO_BATCHES), self.last_s)
        return np.where(self.columns.column[node] > 0, later, 0.0)

    def peak(self, device: int) -> Peak:
        """Returns the peak of a device: when something begins, and all that ends until then has ended."""
        resident, held = self.resident(device), self.held[device]
        base = sum(resident.values())
        if not held:
            return Peak(device, 0.0, base, without_zeros(resident), base)
        counts = [len(one.start_s) for one in held]
        size, pool = np.repeat([one.size for one in held], counts), np.concatenate([one.pool for one in held])
        start_s, end_s = (np.concatenate(times) for times in list(zip(*held, strict=True))[:2])
        begin, end = np.argsort(start_s), np.argsort(end_s)
        most, at_s, reserved = fullest(
            *(start_s[begin], size[begin], pool[begin]), *(end_s[end], size[end], pool[end]), int(pool.max()) + 1
        )
        parts = dict.fromkeys(NAMES, 0)
        for one in held:
            there = np.count_nonzero(one.start_s <= at_s) - np.count_nonzero(one.end_s <= at_s)
            parts[NAMES[one.what]] += int(there) * one.size
        return Peak(device, max(0.0, at_s), base + most, without_zeros(resident | parts), base + reserved)
