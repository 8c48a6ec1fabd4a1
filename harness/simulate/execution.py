"""The event loop: who starts when.

A node (an op, or several that run as one) starts when all nodes before it have ended and all that it needs alone is
free: the queues with a rule, links, and with blocking messages the compute of both ends. Who came first is served
first; on a device's compute a message comes before the next task. At one instant all ends come before all starts.

    ends at t   2F0  1B3 | their successors arrive | whatever can start, starts at t
"""

from __future__ import annotations

from collections import defaultdict, deque
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


class Queue:
    """Who waits for one resource, in order of arrival: urgent nodes, forward tasks, other tasks."""

    def __init__(self) -> None:
        self.urgent: deque[int] = deque()
        self.tasks: tuple[deque[int], deque[int]] = (deque(), deque())

    def heads(self, arrival: dict[int, int]) -> list[int]:
        """The first urgent node alone, else the first task of each kind, the earlier one before."""
        if self.urgent:
            return [self.urgent[0]]
        return sorted((tasks[0] for tasks in self.tasks if tasks), key=arrival.__getitem__)


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
        self.queues: dict[int, Queue] = defaultdict(Queue)
        self.arrival: dict[int, int] = {}
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
            if node in needs and not self.at_once(node):
                self.wait(node)
                served += needs[node]
            else:
                start_s[node] = now
                heappush(events, (now + seconds[node], node))
        for resource in served:
            self.serve(resource, now)

    def at_once(self, node: int) -> bool:
        """Take the only link that a message needs, if nobody has it or waits for it: the short way for most of them."""
        needed = self.work.needs[node]
        resource = needed[0]
        queue = self.queues.get(resource)
        if len(needed) > 1 or node not in self.work.urgent or resource in self.busy or (queue and queue.urgent):
            return False
        self.busy[resource] = node
        return True

    def wait(self, node: int) -> None:
        self.arrival[node] = len(self.arrival)
        for resource in self.work.needs[node]:
            self.line(resource, node).append(node)

    def line(self, resource: int, node: int) -> deque[int]:
        """Where a node waits for a resource."""
        queue = self.queues[resource]
        return queue.urgent if node in self.work.urgent else queue.tasks[not self.ops[node].forward]

    def serve(self, resource: int, now: float) -> None:
        """Start the first in the queue of a free resource, if it is the first in all queues in which it waits."""
        heads = self.queues[resource].heads(self.arrival)
        if not heads or resource in self.busy:
            return
        node = self.choice(resource, heads)
        needed = self.work.needs[node]
        if len(needed) > 1 and any(r in self.busy or self.first(r) != node for r in needed):
            return
        for r in needed:
            self.line(r, node).popleft()
            self.busy[r] = node
        if resource in self.work.rules:
            self.last[resource] = self.ops[node]
        self.start_s[node] = now
        heappush(self.events, (now + self.work.seconds[node], node))

    def first(self, resource: int) -> int:
        return self.queues[resource].heads(self.arrival)[0]

    def choice(self, resource: int, heads: list[int]) -> int:
        """Which of those that wait is next: the first, unless a rule picks among tasks.

        To a rule, the first task of each kind stand for all that are ready.
        """
        rule = self.work.rules.get(resource)
        if rule is None or len(heads) == 1:
            return heads[0]
        return heads[pick(rule, [self.ops[node] for node in heads], self.last.get(resource))]
