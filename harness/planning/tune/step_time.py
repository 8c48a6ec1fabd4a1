"""Analytic estimate of the step time: (m + p - 1) slots, plus the end of the step.

    stage 0  |F0 F1 F2 ..        B0 |F3 B1|F4 B2|                          p stages, m micro-batches
    stage 1  |   F0 F1 B0 F2 B1 ..  |     |     |..              |tail|
              <-- path: one mb. ---> <-----------(m - 1) periods>

path     of one micro-batch through all stages and back: its tasks, its messages, what blocks inside of them
period   the longest of: a device's tasks of a micro-batch; the path shared by the micro-batches that are in flight;
         what a port or the cores of a node need for a micro-batch
tail     sums over copies and replicas, updates, buckets: of the last device to be done with them

All of it is read off the schedule of a few micro-batches, priced as the simulator prices it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

from harness.interfaces import Engine
from harness.planning.draft import Layout
from harness.planning.tune import peak_memory
from harness.planning.tune.extrapolate import few
from harness.schedule import Schedule
from harness.simulator import lower, no_collection
from harness.simulator.fair_sharing import Resource
from harness.simulator.lowering import LoweredSchedule

MESSAGES = ("copy", "send")
BACK = ("R", "B")


@no_collection()
def estimate(engine: Engine, layout: Layout) -> tuple[float, list[int]]:
    """Seconds of a step; bytes of each of `plan.devices`.

    Raises `CannotRun` where replicas are not placed equal on the nodes, ProblemError where there is no such schedule.
    """
    plan = layout.plan
    short = replace(plan, micro_batches=few(plan))
    schedule = engine.schedule(short, layout.profile)
    lowered = lower(schedule, short, layout.profile, layout.cluster, layout.memory)
    held = peak_memory.counted(schedule, short)
    seconds = _Step(schedule, lowered, short.micro_batches).seconds(plan.micro_batches, held[0])
    return seconds, peak_memory.needed(layout, held, short.micro_batches)


class _Step:
    """The nodes of a short step: `tasks` and messages of its `count` micro-batches; the others are its tail."""

    def __init__(self, schedule: Schedule, lowered: LoweredSchedule, count: int) -> None:
        self.schedule, self.work, self.count = schedule, lowered.work, count
        self.ops = lowered.graph.ops
        self.tasks = [node for node, op in enumerate(self.ops) if op.micro_batch is not None]
        self.tails: dict[int, list[list[int]]] = defaultdict(list)  # of each device's queues
        self.slot = 0.0  # of the longest queue of all, for a micro-batch
        for queue, nodes in lowered.queues():
            own = [node for node in nodes if queue.name != "network" or self.ops[node].kind == "collective"]
            self.tails[queue.device].append([node for node in own if self.ops[node].micro_batch is None])
            tasks = (self.alone(node) for node in own if self.ops[node].micro_batch is not None)
            self.slot = max(self.slot, sum(tasks) / count)

    def seconds(self, micro_batches: int, held: peak_memory.Held) -> float:
        """Return the seconds of a step of so many micro-batches, of which the first stage has `held` in flight."""
        path = sum(map(self.alone, filter(self.on_path, self.tasks))) / self.count
        shared = max(self.demand(self.tasks).values(), default=0.0) / self.count
        period = max(self.slot, path / held.of(micro_batches, self.count), shared)
        return self.end(path + (micro_batches - 1) * period)

    def on_path(self, node: int) -> bool:
        """Return whether a node is on the critical path of a micro-batch: all but skips, which are sent next to it."""
        op = self.ops[node]
        return op.peer is None or (op.kind in MESSAGES and not op.part)

    def alone(self, node: int) -> float:
        """Seconds of a node if nothing else is under way."""
        flow = self.work.flows.get(node)
        if flow is None:
            return self.work.seconds[node]
        rate = min([flow.cap, *(self.work.capacity[resource] / times for resource, times in flow.uses.items())])
        return self.work.seconds[node] + flow.amount / rate

    def demand(self, nodes: Iterable[int]) -> dict[Resource, float]:
        """Seconds that each shared resource (a node's port, its cores) needs for all of the nodes' flows."""
        found: dict[Resource, float] = defaultdict(float)
        for node in nodes:
            if flow := self.work.flows.get(node):
                for resource, times in flow.uses.items():
                    found[resource] += flow.amount * times / self.work.capacity[resource]
        return found

    def end(self, passed: float) -> float:
        """Return the end of the step, if the forward and backward passes end after `passed` seconds.

        A device begins its tail when its last backward task is done: the stages before it have theirs still to do. What
        several devices send through one port takes as long as all that is left when one of them begins.
        """
        back = [0.0] * len(self.schedule.devices)
        for node in self.tasks:
            if self.ops[node].kind in BACK:
                back[self.ops[node].stage] += self.alone(node) / self.count
        begun = {device: passed - sum(back[: self.schedule.devices.index(device)]) for device in self.schedule.devices}
        tails = {device: self.tail(self.tails[device]) for device in begun}
        ends = [start + sum(tails[device]) for device, start in begun.items()]
        last = max(rest for _, rest in tails.values())
        demands = {device: self.demand(chain.from_iterable(self.tails[device])) for device in begun}
        for resource in set().union(*demands.values()):
            left = 0.0
            for device in sorted(begun, key=begun.__getitem__, reverse=True):
                left += demands[device].get(resource, 0.0)
                ends.append(begun[device] + left + last)
        return max(ends)

    def tail(self, queues: list[list[int]]) -> tuple[float, float]:
        """Seconds of a device's longest queue, and of one op of each other one: they overlap but for that."""
        found = [(sum(map(self.alone, nodes)), len(nodes)) for nodes in queues if nodes] or [(0.0, 1)]
        longest, count = max(found)
        return longest, sum(seconds / number for seconds, number in found) - longest / count
