"""From a schedule and a cluster to the work of the event loop: durations, who waits for whom, who needs what alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

from harness.cluster import Cluster
from harness.op import COMPUTE, Op
from harness.schedule import LaneOps, Schedule
from harness.schedule.chunks import way
from harness.schedule.graph import DATA, Graph, chains, graph, split_part
from harness.simulate.costs import Costs, disturbances, given
from harness.simulate.execution import Work
from harness.simulate.flows import Flow, Resource
from harness.simulate.routes import Route, Routes


class Assembly:
    """`graph` holds the nodes, `work` what the event loop executes."""

    def __init__(
        self, schedule: Schedule, cluster: Cluster, costs: Costs, durations: Mapping[str, float] | None = None
    ) -> None:
        self.schedule, self.cluster, self.costs, self.durations = schedule, cluster, costs, durations
        self.blocking = cluster.blocking_messages and durations is None
        self.graph: Graph = graph(schedule, self.blocking)
        count = len(self.graph.before)
        self.work = Work([0.0] * count, [0] * count, [[] for _ in range(count)])
        self.resources: dict[Resource, int] = {}
        self.order()
        self.price()
        if schedule.in_line and durations is None:
            self.line_up()
        if durations is None and self.shared_cores():
            self.share_cores()

    def order(self) -> None:
        """Edges: what each node depends on, and the order of the queues. A queue with a rule is a resource instead."""
        after, before = self.work.after, self.work.before
        for node, earlier in enumerate(self.graph.before):
            for one in earlier:
                after[one].append(node)
            before[node] = len(earlier)
        for lane, nodes in self.lanes():
            for chain in chains(lane, nodes):
                for one, following in pairwise(chain):
                    after[one].append(following)
                    before[following] += 1
            if lane.queue != "network" and lane.rule != "in_order":
                resource = self.resource((lane.device, lane.queue))
                self.work.rules[resource] = lane.rule
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
                seconds[node] = given(op, durations)
            return
        tasks = self.costs.seconds
        routes = Routes(self.schedule, self.cluster)
        for node, op in enumerate(self.graph.ops):
            kind = op.kind
            if kind == "step" and op.part:
                seconds[node] = self.costs.update_s(op.bytes)
            elif kind in COMPUTE:
                seconds[node] = tasks[kind][op.stage]
            elif op.seconds is not None:
                seconds[node] = op.seconds
            elif way(op)[0]:
                seconds[node] = self.costs.bucket_s(op.bytes)
            elif kind == "collective":
                self.take(node, routes.collective(op, self.members[node]))
            elif kind != "recv":
                self.take(node, routes.message(op))
        if self.blocking:
            self.block()

    def take(self, node: int, route: Route) -> None:
        self.work.seconds[node] = route.seconds
        if route.flow is not None:
            self.work.flows[node] = route.flow
            for resource in route.flow.uses:
                self.work.capacity[resource] = 1 / self.cluster.node_port.beta_s_per_byte
        if route.links:
            self.work.urgent.add(node)
            self.need(node, *map(self.resource, route.links))

    def line_up(self) -> None:
        """A node without an op before each message of `in_line`: whose turn it is to get in line.

        what m makes   ->  turn of m  ->  m        m and n are on links, which serve who comes first
                               |
        what n makes   ->  turn of n  ->  n
        """
        work, nodes = self.work, {op: node for node, op in enumerate(self.graph.ops)}
        for line in self.schedule.in_line:
            for place, op in enumerate(line):
                node, turn = nodes[op], len(work.seconds)
                earlier = [*self.graph.before[node], *([turn - 1] if place else [])]
                work.seconds.append(0.0)
                work.before.append(len(earlier))
                work.after.append([node])
                work.before[node] += 1
                for one in earlier:
                    work.after[one].append(turn)

    @cached_property
    def members(self) -> dict[int, list[int]]:
        """The devices that take part in each collective."""
        found: dict[int, list[int]] = {}
        for lane, nodes in zip(self.schedule.lanes, self.graph.lanes, strict=True):
            for op, node in zip(lane.ops, nodes, strict=True):
                if op.kind == "collective":
                    found.setdefault(node, []).append(lane.device)
        return found

    def block(self) -> None:
        """Messages occupy the compute of both ends, where they do not stand in those queues anyway."""
        computing = {n for lane, nodes in self.lanes() if lane.queue == "compute" for n in nodes}
        devices = self.schedule.devices
        for node, op in enumerate(self.graph.ops):
            if op.peer is not None and node not in computing and devices[op.peer] != devices[op.stage]:
                ends = (devices[op.stage], devices[op.peer])
                self.work.urgent.add(node)
                self.need(node, *(self.resource((device, "compute")) for device in ends))
        for lane, nodes in self.lanes():
            if lane.queue == "compute":
                for node in nodes:
                    self.need(node, self.resource((lane.device, "compute")))

    def lanes(self) -> list[tuple[LaneOps, list[int]]]:
        return list(zip(self.schedule.lanes, self.graph.lanes, strict=True))

    def shared_cores(self) -> bool:
        """Whether a node has more devices at work than cores."""
        used = len(set(self.schedule.devices)) * self.schedule.replicas * self.schedule.tensor
        return 0 < self.cluster.cores < min(used, self.cluster.devices_per_node)

    def share_cores(self) -> None:
        """Tasks and copies on CPU devices become flows of seconds of work through their node's cores."""
        for lane, nodes in self.lanes():
            node_of_cluster = self.cluster.node(lane.device * self.schedule.tensor)
            alike = self.schedule.alike(lane.device)
            cores = ("cores", node_of_cluster)
            times = sum(self.cluster.node(device) == node_of_cluster for device in alike)
            self.work.capacity[cores] = self.cluster.cores
            for node in nodes:
                if node not in self.work.flows:
                    self.work.flows[node] = Flow(self.work.seconds[node], 1.0, {cores: times})
                    self.work.seconds[node] = 0.0

    def disturb(self, spread: float, seed: int) -> None:
        """Multiply every duration by a factor drawn around 1."""
        for node, factor in enumerate(disturbances(self.graph, spread, seed)):
            self.work.seconds[node] *= factor
            if node in self.work.flows:
                flow = self.work.flows[node]
                self.work.flows[node] = replace(flow, amount=flow.amount * factor)

    def stuck(self, end_s: Sequence[float]) -> list[str]:
        """For each queue with work left, who waits for what."""
        heads = {
            (lane.device, lane.queue): next(node for node in nodes if end_s[node] < 0)
            for lane, nodes in self.lanes()
            if any(end_s[node] < 0 for node in nodes)
        }
        lines = []
        for (device, queue), node in heads.items():
            waits = sorted(self.name(one) for one in self.graph.before[node] if end_s[one] < 0)
            waits += [
                f"its turn in device {lane.device} {lane.queue}, which is at {self.name(head)}"
                for lane, nodes in self.lanes()
                if node in nodes and (head := heads[lane.device, lane.queue]) != node
            ]
            waits += [
                f"{one}, which is before it in line"
                for line in self.schedule.in_line
                for one, following in pairwise(line)
                if following == self.graph.ops[node] and end_s[self.graph.ops.index(one)] < 0
            ]
            lines.append(f"  device {device} {queue}: {self.name(node)} waits for {', '.join(waits)}")
        return lines

    def name(self, node: int) -> str:
        return "the outputs of all micro-batches" if node == self.graph.barrier else str(self.graph.ops[node])


def sent_kind(op: Op, devices: Sequence[int]) -> str | None:
    """Under which name the bytes of a message are counted; None for what is not sent to another device."""
    if op.kind == "collective":
        algorithm, communicator = split_part(op.part)
        return algorithm if communicator == DATA else f"{algorithm}@{communicator}"
    if op.kind not in ("copy", "send") or op.peer is None or devices[op.peer] == devices[op.stage]:
        return None
    if op.part:
        return "skips" if op.forward else "skip_gradients"
    return "activations" if op.forward else "gradients"
