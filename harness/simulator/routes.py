"""Resources that an op occupies in addition to its queues: exclusive links, and shares of node ports.

device 0 --link--> device 1 |port|--------|port| device 2 --link--> device 3
node 0                                                              node 1
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from harness.core.cluster import SEND, Cluster, Link
from harness.core.op import Op
from harness.core.problem import Problem, refuse
from harness.schedule import Schedule
from harness.schedule.dependency_graph import COPIES, DATA, split_part
from harness.simulator.fair_sharing import Flow, Resource

STEPS = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}
"""Times that a collective sends (members - 1) / members of its buffer to the neighbour, in members - 1 messages."""
ROOTED = ("broadcast", "reduce")
"""Collectives with one root, in a pipeline: the buffer goes to each neighbour once. No calibration times them."""


@dataclass(frozen=True)
class Route:
    """An op holds all of `links` exclusively for `seconds`, and then until its `flow`, if any, has ended."""

    seconds: float
    links: tuple[Resource, ...] = ()
    flow: Flow | None = None


class _Ring(NamedTuple):
    """The ring of a collective: its members, how many of the edges stay inside a node, the links of these, and the
    shares of ports that the others use. Of links and ports it has those of the first replica's nodes: all replicas are
    placed equal and run the same ops, so other nodes' are as busy."""

    size: int
    inside: int
    links: tuple[Resource, ...]
    uses: Mapping[Resource, float]


def unplaced(replicas: int, each: int, cluster: Cluster) -> list[Problem]:
    """Returns why one of so many replicas, of `each` devices, cannot represent all: there are too few devices, or some
    are placed on nodes in another way than others."""
    if replicas * each > cluster.devices:
        message = f"x {each} devices of a replica need {replicas * each}, the cluster has {cluster.devices} devices"
        return [Problem("mesh.data", replicas, message, ({"mesh.data": max(1, cluster.devices // each)},))]
    node = cluster.devices_per_node
    if replicas > 1 and each % node and node % each:
        message = f"x {each} devices of a replica: on nodes of {node} devices some replicas would span two nodes"
        hint = f"replicas of a number of devices that divides {node}, or of a multiple of it"
        return [Problem("mesh.data", replicas, message, hint=hint)]
    return []


class Routes:
    """Routes of messages and collectives of one schedule on one cluster."""

    def __init__(self, schedule: Schedule, cluster: Cluster) -> None:
        self.schedule, self.cluster = schedule, cluster
        self.pipeline, self.tensor = max(schedule.devices) + 1, schedule.tensor
        self.routes: dict[tuple[int, int, int], Route] = {}
        self.rings: dict[tuple[bool, tuple[int, ...]], _Ring] = {}
        refuse(unplaced(self.schedule.replicas, self.pipeline * self.tensor, self.cluster))

    def message(self, op: Op) -> Route:
        """Returns the route of a copy, or of a send with its receive; without a peer, to or from the host's memory."""
        own_device = self.schedule.devices[op.stage]
        if op.peer is None:
            return Route(self.cluster.host_link.seconds(op.bytes))
        peer_device = self.schedule.devices[op.peer]
        source, target = (own_device, peer_device) if op.kind == "send" else (peer_device, own_device)
        key = (source * self.tensor, target * self.tensor, op.bytes)
        route = self.routes.get(key)
        if route is None:
            route = self.routes[key] = self._between(*key)
        return route

    def _between(self, source: int, target: int, size: int) -> Route:
        if source == target:
            return Route(0.0)
        if self.cluster.node(source) == self.cluster.node(target):
            seconds = self.cluster.call_s(SEND, 2, size)
            link = _name(self.cluster.intra, source, target)
            return Route(self.cluster.intra.seconds(size) if seconds is None else seconds, (link,))
        pairs = [(source + shift, target + shift) for shift in self._shifts()]
        ports = _crossings(self.cluster, pairs)
        uses = {port: ports[port] for port in _ports(self.cluster, source, target)}
        channel = (_name(self.cluster.node_port, source, target),)  # messages of one pair arrive one after the other
        return self._through_ports(self.cluster.node_port.alpha_s, size, uses, channel)

    def collective(self, op: Op, members: list[int]) -> Route:
        """Returns the route of a ring over `members`, devices of the first replica, or over these in all replicas; of
        calls inside a node, where their times were measured.

        Raises ValueError for an unknown algorithm.

        member 0 -> member 1 -> ... -> member g-1 -> member 0
        """
        algorithm, communicator = split_part(op.part)
        if algorithm not in STEPS:
            raise ValueError(
                f"{op}: {algorithm!r} is not a collective -> one of {', '.join(STEPS)}, as all_reduce@data"
            )
        key = communicator in (DATA, COPIES), tuple(sorted(members))
        ring = self.rings.get(key)
        if ring is None:
            ring = self.rings[key] = self._ring(*key)
        g, rounds = ring.size, STEPS[algorithm]
        if g == 1:
            return Route(0.0)
        sent = rounds * (g - 1) / g * op.bytes
        call_s = self.cluster.collective_call_s + rounds * self._round_s(ring.inside, g - ring.inside)
        latency_s = op.calls * call_s
        if ring.inside == g and self.cluster.calls:
            each = [self.cluster.call_s(algorithm, g, size) or 0.0 for size in op.buffers or (op.bytes,)]
            return Route(sum(each), ring.links)
        if ring.inside == g:
            both = 2 if self.cluster.intra.duplex == "half" and g == 2 else 1
            return Route(latency_s + both * sent * self.cluster.intra.beta_s_per_byte, ring.links)
        beta = self.cluster.intra.beta_s_per_byte if ring.inside else 0.0
        return self._through_ports(latency_s, sent, ring.uses, ring.links, beta)

    def _ring(self, replicated: bool, members: tuple[int, ...]) -> _Ring:
        """Returns the ring over `members`; `replicated`: over these in all replicas."""
        first = [device * self.tensor for device in members]
        if replicated:
            replicas, offsets = self._shifts()[:: self.tensor], list(range(self.tensor))
            ring = [shift + device for shift in replicas for device in first]
        else:
            ring, offsets = first, self._shifts()
        if len(ring) == 1:
            return _Ring(1, 0, (), {})
        node = self.cluster.node
        edges = [*pairwise(ring), (ring[-1], ring[0])]
        inside = [(a, b) for a, b in edges if node(a) == node(b)]
        crossing = [(a, b) for a, b in edges if node(a) != node(b)]
        ports = _crossings(self.cluster, [(a + shift, b + shift) for a, b in crossing for shift in offsets])
        here = {node(device * self.tensor) for device in self.schedule.devices}
        links = dict.fromkeys(_name(self.cluster.intra, a, b) for a, b in inside if node(a) in here)
        of_nodes = (
            (end, port) for a, b in crossing for end, port in zip((a, b), _ports(self.cluster, a, b), strict=True)
        )
        uses = {port: ports[port] for end, port in of_nodes if node(end) in here}
        return _Ring(len(ring), len(inside), tuple(links), uses)

    def _through_ports(
        self,
        alpha_s: float,
        size: float,
        uses: Mapping[Resource, float],
        links: tuple[Resource, ...],
        beta: float = 0.0,
    ) -> Route:
        if self.cluster.node_port.beta_s_per_byte == 0:
            return Route(alpha_s + size * beta, links)
        return Route(alpha_s, links, Flow(size, 1 / max(beta, self.cluster.alone_s_per_byte), uses))

    def _round_s(self, inside: int, crossing: int) -> float:
        """Returns the latency of a call's way round a ring, over all edges but one: `inside` nodes, and `crossing`."""
        alphas = (self.cluster.intra.alpha_s, self.cluster.node_port.alpha_s)
        least = min(alpha for alpha, edges in zip(alphas, (inside, crossing), strict=True) if edges)
        return alphas[0] * inside + alphas[1] * crossing - least

    def _shifts(self) -> list[int]:
        """Returns the offsets of the devices that run the same ops as the first replica's first shards."""
        return self.schedule.counterparts(0)


def _name(link: Link, source: int, target: int) -> Resource:
    """Names the link: one for each direction, or one for both."""
    return ("link", frozenset((source, target))) if link.duplex == "half" else ("link", source, target)


def _ports(cluster: Cluster, source: int, target: int) -> tuple[Resource, Resource]:
    """Names the port out of the source's node, and the one into the target's."""
    both = cluster.node_port.duplex == "half"
    return ("port" if both else "out", cluster.node(source)), ("port" if both else "in", cluster.node(target))


def _crossings(cluster: Cluster, pairs: list[tuple[int, int]]) -> Counter[Resource]:
    """Counts the transfers that cross each port. Replicas run the same ops, so their transfers run at the same time."""
    return Counter(port for source, target in pairs for port in _ports(cluster, source, target))
