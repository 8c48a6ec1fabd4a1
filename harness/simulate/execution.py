"""The event loop: who starts when.

A node (an op, or several that run as one) starts when all nodes before it have ended and all that it needs alone is
free: the queues with a rule, links, and with blocking messages the compute of both ends. Who came first is served
first; on a device's compute a message comes before the next task. At one instant all ends come before all starts.

    ends at t   2F0  1B3 | their successors arrive | whatever can start, starts at t
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from harness.op import Op
from harness.schedule.rule import RuleName, pick
from harness.simulate.flows import Flow, Flows, Resource


@dataclass
class Work:
    """What is to be executed. Lists are indexed by node.

    `needs` are indices of resources that a node occupies alone. `urgent` nodes (messages) come before others where they
    wait for the same one. `rules[r]` says in which order the resource r serves those that are not urgent.
    """

    seconds: list[float]
    before: list[int]
    after: list[list[int]]
    needs: dict[int, tuple[int, ...]] = field(default_factory=dict)
    urgent: set[int] = field(default_factory=set)
    rules: dict[int, RuleName] = field(default_factory=dict)
    flows: dict[int, Flow] = field(default_factory=dict)
    capacity: dict[Resource, float] = field(default_factory=dict)


Waiting = tuple[int, int, int]
"""(0 for urgent and 1 for others, number of arrival, node): sorted as they are served."""


class Execution:
    """`start_s` and `end_s` of each node; an end of -1 is that of a node that never ran."""

    def __init__(self, work: Work, ops: Sequence[Op]) -> None:
        self.work, self.ops = work, ops
        count = len(work.seconds)
        self.start_s, self.end_s = [0.0] * count, [-1.0] * count
        self.missing = list(work.before)
        self.events: list[tuple[float, int]] = []
        self.flows = Flows(work.capacity)
        self.busy: dict[int, int] = {}
        self.queues: dict[int, list[Waiting]] = {}
        self.arrived = 0
        self.last: dict[int, Op] = {}

    def run(self) -> Execution:
        self.begin([node for node, missing in enumerate(self.missing) if not missing], 0.0)
        events, flows = self.events, self.flows
        while events or flows.flows:
            flow_s, key = flows.next() if flows.flows else (float("inf"), -1)
            if events and events[0][0] <= flow_s:
                now, node = heappop(events)
                ended = [node] if node not in self.work.flows else self.into_flow(node, now)
                while events and events[0][0] == now:
                    node = heappop(events)[1]
                    ended += [node] if node not in self.work.flows else self.into_flow(node, now)
            else:
                now, ended = flow_s, [key]
                flows.end(key, now)
            self.end(ended, now)
        return self

    def into_flow(self, node: int, now: float) -> list[int]:
        """The latency is over, the bytes follow."""
        flow = self.work.flows[node]
        if flow.amount <= 0:
            return [node]
        self.flows.add(node, flow, now)
        return []

    def end(self, ended: list[int], now: float) -> None:
        end_s, missing, after, needs = self.end_s, self.missing, self.work.after, self.work.needs
        ready = []
        touched: list[int] = []
        for node in ended:
            end_s[node] = now
            if node in needs:
                for resource in needs[node]:
                    self.busy.pop(resource)
                touched += needs[node]
            for following in after[node]:
                missing[following] -= 1
                if not missing[following]:
                    ready.append(following)
        self.begin(ready, now, touched)

    def begin(self, ready: list[int], now: float, touched: Sequence[int] = ()) -> None:
        """Start what needs nothing alone; let the others wait, then serve every resource that something touched."""
        events, seconds, start_s, needs = self.events, self.work.seconds, self.start_s, self.work.needs
        served = list(touched)
        for node in ready:
            if node in needs:
                self.wait(node)
                served += needs[node]
            else:
                start_s[node] = now
                heappush(events, (now + seconds[node], node))
        for resource in served:
            self.serve(resource, now)

    def wait(self, node: int) -> None:
        self.arrived += 1
        place = (0 if node in self.work.urgent else 1, self.arrived, node)
        for resource in self.work.needs[node]:
            insort(self.queues.setdefault(resource, []), place)

    def serve(self, resource: int, now: float) -> None:
        """Start the first in the queue of a free resource, if it is the first in all queues in which it waits."""
        queue = self.queues.get(resource)
        if not queue or resource in self.busy:
            return
        place = queue[0] if queue[0][0] == 0 else queue[self.choice(resource, queue)]
        node = place[2]
        needed = self.work.needs[node]
        if len(needed) > 1 and any(r in self.busy or self.queues[r][0] is not place for r in needed):
            return
        for r in needed:
            self.queues[r].remove(place)
            self.busy[r] = node
        if resource in self.work.rules:
            self.last[resource] = self.ops[node]
        self.start_s[node] = now
        heappush(self.events, (now + self.work.seconds[node], node))

    def choice(self, resource: int, queue: list[Waiting]) -> int:
        """Which of the waiting tasks (none is urgent) the rule of the resource takes."""
        rule = self.work.rules.get(resource)
        if rule is None:
            return 0
        return pick(rule, [self.ops[node] for _, _, node in queue], self.last.get(resource))
