"""Estimate of the step time: a step of a few micro-batches, and as many periods as there are further ones.

    stage 0  |F0 F1 F2 ..        B0 |F3 B1|F4 B2|          ..   B5|tail|    6 micro-batches fill three stages
    stage 1  |   F0 F1 B0 F2 B1 ..  |     |     |     ..   B5|tail|
              <--------- executed without contention ---------------->  + (m - 6) periods

period   the longest of: a device's tasks of a micro-batch; the path of a micro-batch from a stage to the last one and
         back, shared by those that the stage has in flight; what a port or the cores of a node need for a micro-batch
tail     sums over copies and replicas, updates, buckets

All of it is read off the schedule of a few micro-batches, priced as the simulator prices it. Of transfers that share a
port the work is added up: the simulator follows them through time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, Protocol

from harness.interfaces import Engine
from harness.planning import draft
from harness.planning.draft import Layout
from harness.planning.tune import bounds, peak_memory
from harness.planning.tune.extrapolate import few
from harness.planning.tune.step_on_columns import StepOnColumns
from harness.schedule import Schedule
from harness.simulator import lower, no_collection, without_sharing
from harness.simulator.event_loop import Execution
from harness.simulator.fair_sharing import Resource
from harness.simulator.lowering import LoweredSchedule

MESSAGES = ("copy", "send")
BACK = ("R", "B")
SCHEDULES = 10
"""Schedules that a search simulates for one that it estimates, about, with which compiled code is to pay."""

Shape = tuple[object, ...]
"""What the order of a schedule's tasks follows from: the engine, and of the plan all but sizes and messages."""


class Counted(NamedTuple):
    """Of a schedule: the micro-batches that each stage has in flight, and whether backward passes come in halves."""

    held: list[peak_memory.Held]
    halves: bool


@dataclass
class Known:
    """What a search knows of the schedules that it has made: most candidates need too much memory, and for that none
    need be made again; and those that differ in times and bytes alone are valid if one of them is."""

    counted: dict[Shape, Counted] = field(default_factory=dict)
    valid: set[tuple[Schedule, Shape]] = field(default_factory=set)


class Estimate:
    """Of a plan, each on demand: the bytes of its devices, a bound of the seconds of a step, and these seconds.

    `known` is what the search knows of schedules. Raises ProblemError where there is none.
    """

    def __init__(self, engine: Engine, layout: Layout, known: Known) -> None:
        self.engine, self.layout, self.known = engine, layout, known
        self.short = replace(layout.plan, micro_batches=few(layout.plan))
        if self.shape not in known.counted:
            known.counted[self.shape] = self._counted()
        self.held, self.halves = known.counted[self.shape]

    @no_collection()
    def _counted(self) -> Counted:
        """Count a schedule without what the shards of a stage send each other: that changes no task's place."""
        tasks = self.engine.schedule(replace(self.short, traffic=()), self.layout.profile)
        halves = any(op.kind == "W" for queue in tasks.queues for op in queue.ops)
        return Counted(peak_memory.counted(tasks, self.short), halves)

    @cached_property
    def peaks(self) -> list[int]:
        """Bytes of each of `plan.devices`."""
        return peak_memory.needed(self.layout, self.held, self.short.micro_batches)

    @property
    def shape(self) -> Shape:
        plan = self.short
        devices = tuple(stage.device for stage in plan.stages)
        return self.engine, devices, plan.micro_batches, plan.recompute, plan.pattern, plan.order

    @cached_property
    @no_collection()
    def schedule(self) -> Schedule:
        """The one of a few micro-batches."""
        return self.engine.schedule(self.short, self.layout.profile)

    def least_s(self) -> float:
        """Return seconds that no schedule of the plan can go below."""
        return bounds.of_plan(self.layout, self.halves)

    @no_collection()
    def validate(self, engine: str) -> None:
        """Raise `CannotRun` for errors of the schedule of a few micro-batches, under this name of the engine."""
        found = replace(self.schedule), self.shape  # ops are equal whatever their times and bytes are
        if found not in self.known.valid:
            draft.refuse_invalid(engine, self.schedule, self.short)
            self.known.valid.add(found)

    @no_collection()
    def seconds(self) -> float:
        """Return the seconds of a step. Raises `CannotRun` where replicas are not placed equal on the nodes."""
        one, count = self.layout, self.short.micro_batches
        given = self.schedule, self.short, one.profile, one.cluster, one.memory
        on_columns = without_sharing(*given, times=SCHEDULES)
        steps: Iterable[Step] = (
            (_Step(self.schedule, lowered, count) for lowered in lower(*given))
            if on_columns is None
            else (StepOnColumns(self.schedule, replica, count) for replica in on_columns)
        )
        return max(step.seconds(one.plan.micro_batches, self.held) for step in steps)


class Step(Protocol):
    """A short step, of which it is known when its nodes end if none waits for a shared resource."""

    def seconds(self, micro_batches: int, held: Sequence[peak_memory.Held]) -> float:
        """Return the seconds of a step of so many micro-batches; the stages have `held` of them in flight."""


class _Step:
    """The nodes of a short step: `tasks` and messages of its `count` micro-batches; the others are its tail. Where
    there are many ops, `harness.planning.tune.step_on_columns` does the same, to the last bit."""

    def __init__(self, schedule: Schedule, lowered: LoweredSchedule, count: int) -> None:
        self.schedule, self.work, self.count = schedule, lowered.work, count
        self.ops = lowered.graph.ops
        self.tasks = [node for node, op in enumerate(self.ops) if op.micro_batch is not None]
        self.alone = [lowered.uncontended_s(node) for node in range(len(self.work.seconds))]
        self.tails: dict[int, list[int]] = defaultdict(list)  # of each device
        self.slot = 0.0  # of the longest queue of all, for a micro-batch
        for queue, nodes in lowered.queues():
            own = [node for node in nodes if queue.name != "network" or self.ops[node].kind == "collective"]
            self.tails[queue.device] += [node for node in own if self.ops[node].micro_batch is None]
            tasks = (self.alone[node] for node in own if self.ops[node].micro_batch is not None)
            self.slot = max(self.slot, sum(tasks) / count)

    def seconds(self, micro_batches: int, held: Sequence[peak_memory.Held]) -> float:
        """Return the seconds of a step of so many micro-batches; the stages have `held` of them in flight."""
        done = Execution(replace(self.work, seconds=self.alone, flows={}), self.ops).run()
        paths = self.paths(len(held))
        shared = max(self.demand(self.tasks).values(), default=0.0) / self.count
        late = max(0.0, paths[0] + (self.count - 1) * shared - max(done.end_s[node] for node in self.tasks))
        flying = (one.of(micro_batches, self.count) for one in held)
        period = max(self.slot, shared, *(path / count for path, count in zip(paths, flying, strict=True)))
        return self.end(done.end_s) + late + (micro_batches - self.count) * period

    def paths(self, stages: int) -> list[float]:
        """Seconds of a micro-batch from each stage to the last one and back: its tasks, and all messages but skips,
        which are sent next to these."""
        each = [0.0] * stages
        for node in self.tasks:
            op = self.ops[node]
            if op.peer is None or (op.kind in MESSAGES and not op.part):
                each[op.stage if op.peer is None else min(op.stage, op.peer)] += self.alone[node] / self.count
        return [*accumulate(reversed(each))][::-1]

    def demand(self, nodes: Iterable[int]) -> dict[Resource, float]:
        """Seconds that each shared resource (a node's port, its cores) needs for all of the nodes' flows."""
        found: dict[Resource, float] = defaultdict(float)
        for node in nodes:
            if flow := self.work.flows.get(node):
                for resource, times in flow.uses.items():
                    found[resource] += flow.amount * times / self.work.capacity[resource]
        return found

    def end(self, end_s: Sequence[float]) -> float:
        """Return the end of a step whose nodes end so if none waits for a shared resource.

        What several devices send through one port takes as long as all that is left when one of them begins: this is
        when its last backward task is done.
        """
        begun = dict.fromkeys(self.schedule.devices, 0.0)
        for node in self.tasks:
            if self.ops[node].kind in BACK:
                device = self.schedule.devices[self.ops[node].stage]
                begun[device] = max(begun[device], end_s[node])
        ends = [max(end_s)]
        tails = [self.tails[device] for device in begun if any(node in self.work.flows for node in self.tails[device])]
        after = [max(end_s[n] for n in tail) - max(end_s[n] for n in tail if n in self.work.flows) for tail in tails]
        demands = {device: self.demand(self.tails[device]) for device in begun}
        for resource in set().union(*demands.values()):
            left = 0.0
            for device in sorted(begun, key=begun.__getitem__, reverse=True):
                left += demands[device].get(resource, 0.0)
                ends.append(begun[device] + left + max(after, default=0.0))
        return max(ends)
