"""Lowers a schedule on a cluster to the work of the event loop: durations, dependencies, exclusive resources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

from harness.core.cluster import Cluster
from harness.core.op import COMPUTE, Op
from harness.schedule import QueueOps, Schedule
from harness.schedule.dependency_graph import DATA, Graph, build_graph, chains, split_part
from harness.simulator.event_loop import Work
from harness.simulator.fair_sharing import Flow, Resource, fair_rates
from harness.simulator.op_durations import TaskCosts, disturbances, given_duration
from harness.simulator.prices import Prices
from harness.simulator.routes import Route


class LoweredSchedule:
    """A schedule on a cluster: `graph` holds the nodes, `work` what the event loop executes."""

    def __init__(
        self,
        schedule: Schedule,
        cluster: Cluster,
        costs: TaskCosts,
        durations: Mapping[str, float] | None = None,
        slow: Mapping[int, float] | None = None,
    ) -> None:
        self.schedule, self.cluster, self.costs, self.durations = schedule, cluster, costs, durations
        self.slow = slow or {}
        self.blocking = cluster.blocking_messages and durations is None
        self.graph: Graph = build_graph(schedule, blocking=True) if self.blocking else schedule.graph
        count = len(self.graph.before)
        self.work = Work([0.0] * count, [0] * count, [[] for _ in range(count)])
        self.before_s: dict[int, float] = {}
        self.resources: dict[Resource, int] = {}
        self.order()
        self.price()
        if schedule.message_order and durations is None:
            self.order_messages()
        if durations is None and shared_cores(schedule, cluster):
            self.share_cores()

    def order(self) -> None:
        """Adds the edges: dependencies, and the order of the queues. A queue with a rule becomes a resource."""
        after, before = self.work.after, self.work.before
        for node, earlier in enumerate(self.graph.before):
            for dependency in earlier:
                after[dependency].append(node)
            before[node] = len(earlier)
        for queue, nodes in self.queues():
            for chain in chains(queue, nodes):
                for previous, following in pairwise(chain):
                    after[previous].append(following)
                    before[following] += 1
            if queue.name != "network" and queue.rule != "in_order":
                resource = self.resource((queue.device, queue.name))
                self.work.rules[resource] = queue.rule
                for node in nodes:
                    self.need(node, resource)

    def resource(self, name: Resource) -> int:
        return self.resources.setdefault(name, len(self.resources))

    def need(self, node: int, *resources: int) -> None:
        self.work.needs[node] = tuple(dict.fromkeys(self.work.needs.get(node, ()) + resources))

    def price(self) -> None:
        seconds, durations = self.work.seconds, self.durations
        if durations is not None:
            for node, op in enumerate(self.graph.ops):
                seconds[node] = given_duration(op, durations)
            return
        prices = Prices(self.schedule, self.cluster, self.costs, self.slow)
        split = {(op.stage, op.micro_batch) for op in self.graph.ops if op.kind == "W"}
        for node, op in enumerate(self.graph.ops):
            kind = op.kind
            if kind in COMPUTE:
                seconds[node] = prices.task_s(op, kind == "B" and (op.stage, op.micro_batch) in split)
            elif op.seconds is not None:
                seconds[node] = op.seconds
            elif kind == "collective":
                self.take(node, prices.collective(op, self.members[node]))
            elif kind != "recv":
                self.take(node, prices.message(op))
        self.wait_for_the_host(prices)
        if self.blocking:
            self.block()

    def wait_for_the_host(self, prices: Prices) -> None:
        """Notes what passes before each task, which is part of its seconds; before a device's first one there is what
        passes once in a step, too."""
        costs = self.cluster.engine_costs
        if not (costs.host_s or costs.step_s):
            return
        for node, op in enumerate(self.graph.ops):
            if op.kind in COMPUTE:
                more_s = prices.beginning_s(op)
                self.work.seconds[node] += more_s
                self.before_s[node] = costs.host_s * prices.factor(op) + more_s

    def uncontended_s(self, node: int) -> float:
        """Returns the seconds of a node if nothing else is under way."""
        flow = self.work.flows.get(node)
        if flow is None:
            return self.work.seconds[node]
        rate = fair_rates({0: flow}, self.work.capacity, self.work.alone)[0]
        return self.work.seconds[node] + flow.amount / rate

    def take(self, node: int, route: Route) -> None:
        self.work.seconds[node] = route.seconds
        if route.flow is not None:
            self.work.flows[node] = route.flow
            for resource in route.flow.uses:
                port = self.work.capacity[resource] = 1 / self.cluster.node_port.beta_s_per_byte
                if self.cluster.alone_bandwidth > port:
                    self.work.alone[resource] = self.cluster.alone_bandwidth
        if route.links:
            self.work.urgent.add(node)
            self.need(node, *map(self.resource, route.links))

    def order_messages(self) -> None:
        """Adds a node without an op before each message of `message_order`, which lets it wait for its link.

        what m makes   ->  turn of m  ->  m        m and n are on links, which serve in order of arrival
                               |
        what n makes   ->  turn of n  ->  n
        """
        work, nodes = self.work, {op: node for node, op in enumerate(self.graph.ops)}
        for line in self.schedule.message_order:
            for place, op in enumerate(line):
                node, turn = nodes[op], len(work.seconds)
                earlier = [*self.graph.before[node], *([turn - 1] if place else [])]
                work.seconds.append(0.0)
                work.before.append(len(earlier))
                work.after.append([node])
                work.before[node] += 1
                for dependency in earlier:
                    work.after[dependency].append(turn)

    @cached_property
    def members(self) -> dict[int, list[int]]:
        """Maps each collective to the devices that take part."""
        devices_of: dict[int, list[int]] = {}
        for queue, nodes in zip(self.schedule.queues, self.graph.queues, strict=True):
            for op, node in zip(queue.ops, nodes, strict=True):
                if op.kind == "collective":
                    devices_of.setdefault(node, []).append(queue.device)
        return devices_of

    def block(self) -> None:
        """Makes messages occupy the compute queues of both ends, unless they are listed there."""
        computing = {n for queue, nodes in self.queues() if queue.name == "compute" for n in nodes}
        devices = self.schedule.devices
        for node, op in enumerate(self.graph.ops):
            if op.peer is not None and node not in computing and devices[op.peer] != devices[op.stage]:
                ends = (devices[op.stage], devices[op.peer])
                self.work.urgent.add(node)
                self.need(node, *(self.resource((device, "compute")) for device in ends))
        for queue, nodes in self.queues():
            if queue.name == "compute":
                for node in nodes:
                    self.need(node, self.resource((queue.device, "compute")))

    def queues(self) -> list[tuple[QueueOps, list[int]]]:
        return list(zip(self.schedule.queues, self.graph.queues, strict=True))

    def share_cores(self) -> None:
        """Turns tasks and copies on CPU devices into flows of seconds of work through their node's cores. What passes
        before a task needs none."""
        for queue, nodes in self.queues():
            node_of_cluster = self.cluster.node(queue.device * self.schedule.tensor)
            counterparts = self.schedule.counterparts(queue.device)
            cores = ("cores", node_of_cluster)
            times = sum(self.cluster.node(device) == node_of_cluster for device in counterparts)
            self.work.capacity[cores] = self.cluster.cores
            if self.cluster.cores < 1:  # threads that only hinder each other: one alone has a core
                self.work.alone[cores] = 1.0
            for node in nodes:
                if node not in self.work.flows:
                    before_s = self.before_s.get(node, 0.0)
                    self.work.flows[node] = Flow(self.work.seconds[node] - before_s, 1.0, {cores: times})
                    self.work.seconds[node] = before_s

    def disturb(self, spread: float, seed: int) -> None:
        """Multiplies every duration by a factor drawn around 1."""
        for node, factor in enumerate(disturbances(len(self.graph.before), spread, seed)):
            self.work.seconds[node] *= factor
            if node in self.before_s:
                self.before_s[node] *= factor
            if node in self.work.flows:
                flow = self.work.flows[node]
                self.work.flows[node] = replace(flow, amount=flow.amount * factor)

    def stuck(self, end_s: Sequence[float]) -> list[str]:
        """Returns a line for each queue with work left: which op waits for what."""
        heads = {
            (queue.device, queue.name): next(node for node in nodes if end_s[node] < 0)
            for queue, nodes in self.queues()
            if any(end_s[node] < 0 for node in nodes)
        }
        lines = []
        for (device, queue), node in heads.items():
            waits = sorted(self.name(dependency) for dependency in self.graph.before[node] if end_s[dependency] < 0)
            waits += [
                f"its turn in device {queue.device} {queue.name}, which is at {self.name(head)}"
                for queue, nodes in self.queues()
                if node in nodes and (head := heads[queue.device, queue.name]) != node
            ]
            waits += [
                f"{previous}, which is before it in `message_order`"
                for line in self.schedule.message_order
                for previous, following in pairwise(line)
                if following == self.graph.ops[node] and end_s[self.graph.ops.index(previous)] < 0
            ]
            lines.append(f"  device {device} {queue}: {self.name(node)} waits for {', '.join(waits)}")
        return lines

    def name(self, node: int) -> str:
        return "the outputs of all micro-batches" if node == self.graph.barrier else str(self.graph.ops[node])


def shared_cores(schedule: Schedule, cluster: Cluster) -> bool:
    """Returns whether a node has more busy devices than cores."""
    used = len(set(schedule.devices)) * schedule.replicas * schedule.tensor
    return 0 < cluster.cores < min(used, cluster.devices_per_node)


def slow_replicas(schedule: Schedule, cluster: Cluster) -> list[dict[int, float]]:
    """Returns for each replica that has slow devices how many times as long the tasks of its pipeline's devices take,
    those of its slowest shard; where none has, one that is like all."""
    factors = dict(cluster.slow)
    found: dict[int, dict[int, float]] = {}
    for device in sorted(set(schedule.devices)):
        for place, own in enumerate(schedule.counterparts(device)):
            if own in factors:
                slow = found.setdefault(place // schedule.tensor, {})
                slow[device] = max(slow.get(device, 1.0), factors[own])
    return [*found.values()] or [{}]


def sent_kind(op: Op, devices: Sequence[int]) -> str | None:
    """Returns the name under which the bytes of a message are counted; None if it stays on its device."""
    if op.kind == "collective":
        algorithm, communicator = split_part(op.part)
        return algorithm if communicator == DATA else f"{algorithm}@{communicator}"
    if op.kind not in ("copy", "send") or op.peer is None or devices[op.peer] == devices[op.stage]:
        return None
    if op.part:
        return "skips" if op.forward else "skip_gradients"
    return "activations" if op.forward else "gradients"
