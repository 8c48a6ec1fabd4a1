"""The event loop of the simulator: decides when each node starts.

A node (an op, or several that run as one) starts when all nodes before it have ended and all resources that it needs
exclusively are free: queues with a rule, links, and with blocking messages the compute queues of both ends. Nodes are
served in order of arrival; on a device's compute queue a message goes before the next task. At one instant all ends
are handled before all starts, and a rule picks when all that happens at that instant has happened: messages that take
no time have arrived, backward tasks before forward tasks.

    ends at t   2F0  1B3 | their successors arrive | whatever can start, starts at t | rules pick
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from harness.core.op import Op
from harness.schedule.policy import RuleName, pick
from harness.simulator.fair_sharing import Flow, Flows, Resource

INFINITE = float("inf")
SAME = 1 + 1e-9
"""Times within this factor are one instant: sums in another order differ by their rounding."""


@dataclass
class Work:
    """The nodes to execute. Lists are indexed by node.

    `needs` are indices of resources that a node occupies exclusively. `urgent` nodes (messages) go before others that
    wait for the same resource. `rules[r]` says in which order the resource r serves those that are not urgent.
    """

    seconds: list[float]
    before: list[int]
    after: list[list[int]]
    needs: dict[int, tuple[int, ...]] = field(default_factory=dict)
    urgent: set[int] = field(default_factory=set)
    rules: dict[int, RuleName] = field(default_factory=dict)
    flows: dict[int, Flow] = field(default_factory=dict)
    capacity: dict[Resource, float] = field(default_factory=dict)
    alone: dict[Resource, float] = field(default_factory=dict)


Arrival = tuple[float, bool, int]
"""When a node arrived, whether it is a forward task, and how many nodes arrived before."""


class Queue:
    """The nodes that wait for one resource, in order of arrival: urgent nodes, forward tasks, other tasks."""

    def __init__(self) -> None:
        self.urgent: deque[int] = deque()
        self.tasks: tuple[deque[int], deque[int]] = (deque(), deque())

    def heads(self, arrival: dict[int, Arrival]) -> list[int]:
        """Returns the first urgent node alone, else the first task of each kind, in order of arrival."""
        if self.urgent:
            return [self.urgent[0]]
        return sorted((tasks[0] for tasks in self.tasks if tasks), key=arrival.__getitem__)


class Execution:
    """Computes `start_s` and `end_s` of each node; a node that never ran ends at -1."""

    def __init__(self, work: Work, ops: Sequence[Op]) -> None:
        self.work, self.ops = work, ops
        count = len(work.seconds)
        self.start_s, self.end_s = [0.0] * count, [-1.0] * count
        self.missing = list(work.before)
        self.events: list[tuple[float, int]] = []
        self.flows = Flows(work.capacity, work.alone)
        self.busy: dict[int, int] = {}
        self.queues: dict[int, Queue] = defaultdict(Queue)
        self.arrival: dict[int, Arrival] = {}
        self.picking: dict[int, None] = {}  # queues with a rule that changed at this instant
        self.last: dict[int, Op] = {}

    def run(self) -> Execution:
        now = 0.0
        self.begin([node for node, missing in enumerate(self.missing) if not missing], now)
        events, flows = self.events, self.flows
        while events or flows.flows or self.picking:
            flow_s, key = flows.next() if flows.flows else (INFINITE, -1)
            if self.picking and min(flow_s, events[0][0] if events else INFINITE) > now * SAME:
                self.pick(now)
                continue
            if events and events[0][0] <= flow_s:
                now, node = heappop(events)
                ended = [node] if node not in self.work.flows else self.into_flow(node, now)
                while events and events[0][0] <= now * SAME:
                    node = heappop(events)[1]
                    ended += [node] if node not in self.work.flows else self.into_flow(node, now)
            else:
                now, ended = flow_s, [key]
                flows.end(key, now)
            self.end(ended, now)
        return self

    def into_flow(self, node: int, now: float) -> list[int]:
        """Starts the flow of a node whose latency is over; returns the node if it has no bytes."""
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
        """Starts the nodes that need no exclusive resource; queues the others, then serves every resource that
        changed."""
        events, seconds, start_s, needs = self.events, self.work.seconds, self.start_s, self.work.needs
        changed = list(touched)
        for node in ready:
            if node in needs and not self.at_once(node):
                self.wait(node, now)
                changed += needs[node]
            else:
                start_s[node] = now
                heappush(events, (now + seconds[node], node))
        for resource in changed:
            if resource in self.work.rules:
                self.picking[resource] = None
            else:
                self.serve(resource, now)

    def pick(self, now: float) -> None:
        """Serves the queues with a rule, at the end of an instant."""
        changed, self.picking = self.picking, {}
        for resource in changed:
            self.serve(resource, now)

    def at_once(self, node: int) -> bool:
        """Takes the only link that a message needs, if it is free and nobody waits for it: the fast path of most
        messages."""
        needed = self.work.needs[node]
        resource = needed[0]
        queue = self.queues.get(resource)
        if len(needed) > 1 or node not in self.work.urgent or resource in self.busy or (queue and queue.urgent):
            return False
        self.busy[resource] = node
        return True

    def wait(self, node: int, now: float) -> None:
        self.arrival[node] = now, self.ops[node].forward, len(self.arrival)
        for resource in self.work.needs[node]:
            self.line(resource, node).append(node)

    def line(self, resource: int, node: int) -> deque[int]:
        """Returns the line in which a node waits for a resource."""
        queue = self.queues[resource]
        return queue.urgent if node in self.work.urgent else queue.tasks[not self.ops[node].forward]

    def serve(self, resource: int, now: float) -> None:
        """Starts the first node in the queue of a free resource, if it is the first in all queues in which it waits."""
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
        """Returns which waiting node is next: the first, unless a rule picks among tasks.

        The rule chooses between the first tasks of each kind.
        """
        rule = self.work.rules.get(resource)
        if rule is None or len(heads) == 1:
            return heads[0]
        return heads[pick(rule, [self.ops[node] for node in heads], self.last.get(resource))]
