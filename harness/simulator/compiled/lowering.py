"""The lowering of `harness.simulator.lowering`, on columns: each template of ops is priced once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from harness.core.cluster import Cluster
from harness.core.op import COMPUTE, Op
from harness.schedule import Schedule
from harness.schedule.policy import RULES
from harness.simulator.compiled.columns import Columns
from harness.simulator.compiled.edges import EMPTY, Edges
from harness.simulator.compiled.tables import NO_RULE, Numbers, Seconds, Tables, joined, sliced
from harness.simulator.fair_sharing import Flow, Resource, fair_rates
from harness.simulator.op_durations import TaskCosts, disturbances
from harness.simulator.prices import Prices
from harness.simulator.routes import Route

NOTHING = Route(0.0)


class LoweredColumns:
    """A schedule on a cluster: `tables` are what the event loop executes, `before_s` what passes before each task,
    `members` how many devices take part in a collective, 1 for any other node."""

    def __init__(
        self, schedule: Schedule, columns: Columns, cluster: Cluster, costs: TaskCosts, slow: Mapping[int, float]
    ) -> None:
        self.schedule, self.columns, self.cluster = schedule, columns, cluster
        self.prices = Prices(schedule, cluster, costs, slow)
        self.edges = Edges(schedule, columns).draw()
        self.count = len(self.edges[0])
        self.seconds, self.before_s = np.zeros(self.count), np.zeros(self.count)
        self.members = np.ones(self.count, dtype=np.int64)
        self.resources: dict[Resource, int] = {}
        self.rules: dict[int, int] = {}
        self.shared: dict[Resource, int] = {}
        self.capacity: list[float] = []
        self.alone: list[float] = []
        self.needs: list[tuple[Numbers, Numbers]] = [(EMPTY, EMPTY)]
        self.urgent = np.zeros(self.count, dtype=np.bool_)
        self.flow_nodes: list[Numbers] = [EMPTY]
        self.flow_amounts: list[Seconds] = [np.zeros(0)]
        self.flow_kinds: list[Numbers] = [EMPTY]
        self.kinds: list[tuple[float, Mapping[Resource, float]]] = []  # of flows: the cap and the uses

    def lower(self, cores_are_shared: bool, blocking: bool, jitter: float, seed: int) -> Tables:
        """Returns the tables. With a `jitter` all times differ from what they would be, by a factor of `seed`."""
        self.pick_by_rules()
        self.price()
        if blocking:
            self.block()
        if cores_are_shared:
            self.share_cores()
        if jitter:
            factors = np.array(disturbances(self.count, jitter, seed))
            self.seconds *= factors
            self.before_s *= factors
            self.flow_amounts = [
                amounts * factors[nodes] for nodes, amounts in zip(self.flow_nodes, self.flow_amounts, strict=True)
            ]
        return self.tables()

    def resource(self, name: Resource) -> int:
        return self.resources.setdefault(name, len(self.resources))

    def pick_by_rules(self) -> None:
        for queue, nodes in zip(self.schedule.queues, self.columns.queues, strict=True):
            if queue.name != "network" and queue.rule != "in_order":
                resource = self.resource((queue.device, queue.name))
                self.rules[resource] = RULES.index(queue.rule)
                self.needs.append((nodes, np.full(len(nodes), resource)))

    def price(self) -> None:
        columns, priced = self.columns, [self.priced(op) for op in self.columns.templates]
        kind_of = columns.template.copy()
        for node, members in self.collectives().items():
            self.members[node], kind_of[node] = len(members), len(priced)
            op = columns.templates[columns.template[node]]
            priced.append(NOTHING if op.seconds is not None else self.prices.collective(op, members))
            if op.seconds is not None:
                priced[-1] = Route(op.seconds)
        ops = len(columns.template)
        self.seconds[:ops] = np.array([route.seconds for route in priced])[kind_of]
        self.halves()
        self.wait_for_the_host()
        links_at, links = joined([[self.resource(link) for link in route.links] for route in priced])
        which, needed = sliced(links_at, links, kind_of)
        self.needs.append((which, needed))
        self.urgent[which] = True
        for route in priced:
            for name in route.flow.uses if route.flow else ():
                self.share(name, 1 / self.cluster.node_port.beta_s_per_byte, self.cluster.alone_bandwidth)
        flows = {place: route.flow for place, route in enumerate(priced) if route.flow is not None}
        if flows:
            number = np.full(len(priced), -1)
            number[list(flows)] = np.arange(len(flows)) + len(self.kinds)
            self.kinds += [(flow.cap, flow.uses) for flow in flows.values()]
            amounts = np.array([flows[place].amount if place in flows else 0.0 for place in range(len(priced))])
            nodes = np.flatnonzero(number[kind_of] >= 0)
            self.add_flows(nodes, amounts[kind_of[nodes]], number[kind_of[nodes]])

    def priced(self, op: Op) -> Route:
        """Returns what ops of a template take, but collectives, which depend on who takes part."""
        if op.kind in COMPUTE:
            return Route(self.prices.task_s(op, split=False))
        if op.seconds is not None:
            return Route(op.seconds)
        return NOTHING if op.kind in ("collective", "recv") else self.prices.message(op)

    def collectives(self) -> dict[int, list[int]]:
        """Maps each collective to the devices that take part."""
        found: dict[int, list[int]] = {}
        kinds = np.array([op.kind == "collective" for op in self.columns.templates])
        for queue, nodes in zip(self.schedule.queues, self.columns.queues, strict=True):
            for node in nodes[kinds[self.columns.template[nodes]]].tolist():
                found.setdefault(node, []).append(queue.device)
        return found

    def halves(self) -> None:
        """Where the gradients of the weights are a task of their own, a backward task computes those of the inputs."""
        for op, identity in zip(self.columns.templates, self.columns.identity_of, strict=True):
            weights = self.columns.identity("W", op.stage, None)
            if op.kind == "B" and weights >= 0:
                rows = self.columns.table[[identity, weights]]
                self.seconds[rows[0, (rows >= 0).all(axis=0)]] = self.prices.task_s(op, split=True)

    def wait_for_the_host(self) -> None:
        costs, columns = self.cluster.engine_costs, self.columns
        if not (costs.host_s or costs.step_s):
            return
        ops = len(columns.template)
        host_s = [costs.host_s * self.prices.factor(op) if op.kind in COMPUTE else 0.0 for op in columns.templates]
        more_s = np.zeros(ops)
        for node in np.flatnonzero(columns.column == 1).tolist():  # micro-batch 0
            op = columns.templates[columns.template[node]]
            more_s[node] = self.prices.beginning_s(Op(op.stage, op.kind, 0, op.part, op.peer))
        self.seconds[:ops] += more_s
        self.before_s[:ops] = np.array(host_s)[columns.template] + more_s

    def block(self) -> None:
        """Makes messages occupy the compute queues of both ends, unless they are listed there."""
        columns, devices = self.columns, self.schedule.devices
        computing = np.zeros(self.count, dtype=np.bool_)
        queues = [
            (self.resource((queue.device, "compute")), nodes)
            for queue, nodes in zip(self.schedule.queues, columns.queues, strict=True)
            if queue.name == "compute"
        ]
        for _, nodes in queues:
            computing[nodes] = True
        ends = [
            [self.resource((devices[end], "compute")) for end in (op.stage, op.peer)]
            if op.peer is not None and devices[op.peer] != devices[op.stage]
            else []
            for op in columns.templates
        ]
        which, needed = sliced(*joined(ends), columns.template)
        free = ~computing[which]
        self.needs.append((which[free], needed[free]))
        self.urgent[which[free]] = True
        self.needs += [(nodes, np.full(len(nodes), resource)) for resource, nodes in queues]

    def share(self, name: Resource, capacity: float, alone: float) -> None:
        """Adds a resource that flows share; a flow that has it alone gets `alone`, if that is more."""
        if name not in self.shared:
            self.shared[name] = len(self.shared)
            self.capacity.append(capacity)
            self.alone.append(alone if alone > capacity else 0.0)

    def add_flows(self, nodes: Numbers, amounts: Seconds, kinds: Numbers) -> None:
        self.flow_nodes.append(nodes)
        self.flow_amounts.append(amounts)
        self.flow_kinds.append(kinds)

    def share_cores(self) -> None:
        """Turns tasks and copies on CPU devices into flows of seconds of work through their node's cores."""
        flows = np.zeros(self.count, dtype=np.bool_)
        flows[np.concatenate(self.flow_nodes)] = True
        for queue, nodes in zip(self.schedule.queues, self.columns.queues, strict=True):
            home = self.cluster.node(queue.device * self.schedule.tensor)
            counterparts = self.schedule.counterparts(queue.device)
            times = sum(self.cluster.node(device) == home for device in counterparts)
            self.share(("cores", home), self.cluster.cores, 1.0)
            new = nodes[~flows[nodes]]
            flows[new] = True
            self.add_flows(new, self.seconds[new] - self.before_s[new], np.full(len(new), len(self.kinds)))
            self.kinds.append((1.0, {("cores", home): times}))
            self.seconds[new] = self.before_s[new]

    def alone_s(self) -> Seconds:
        """Returns the seconds of each node if nothing else is under way."""
        capacity = dict(zip(self.shared, self.capacity, strict=True))
        alone = {name: rate for name, rate in zip(self.shared, self.alone, strict=True) if rate}
        rates = np.array([fair_rates({0: Flow(0.0, *kind)}, capacity, alone)[0] for kind in self.kinds])
        found = self.seconds.copy()
        for nodes, amounts, kinds in zip(self.flow_nodes, self.flow_amounts, self.flow_kinds, strict=True):
            found[nodes] += amounts / rates[kinds]
        return found

    def tables(self) -> Tables:
        before, after_at, after = self.edges
        needs_at, needs, owner = _distinct(self.needs, self.count, len(self.resources))
        rules = np.full(len(self.resources), NO_RULE, dtype=np.int64)
        rules[list(self.rules)] = list(self.rules.values())
        forward = np.zeros(self.count, dtype=np.bool_)
        ops = len(self.columns.template)
        forward[:ops] = np.array([op.forward for op in self.columns.templates])[self.columns.template]
        nodes, kinds = np.concatenate(self.flow_nodes), np.concatenate(self.flow_kinds)
        order = np.argsort(nodes)
        flow = np.full(self.count, -1, dtype=np.int64)
        flow[nodes[order]] = np.arange(len(nodes))
        uses_at, uses = joined([[self.shared[name] for name in uses] for _, uses in self.kinds])
        flows, places = sliced(uses_at, np.arange(len(uses)), kinds[order])
        return Tables(
            seconds=self.seconds,
            before=before,
            after_at=after_at,
            after=after,
            needs_at=needs_at,
            needs=needs,
            owner=owner,
            urgent=self.urgent,
            forward=forward,
            backward=self.backward(),
            rules=rules,
            flow=flow,
            amount=np.concatenate(self.flow_amounts)[order],
            cap=np.array([cap for cap, _ in self.kinds], dtype=np.float64)[kinds[order]],
            uses_at=np.searchsorted(flows, np.arange(len(nodes) + 1)),
            uses=uses[places],
            times=np.array([times for _, uses in self.kinds for times in uses.values()], dtype=np.float64)[places],
            capacity=np.array(self.capacity, dtype=np.float64),
            alone=np.array(self.alone, dtype=np.float64),
        )

    def backward(self) -> Numbers:
        found, columns = np.full(self.count, -1, dtype=np.int64), self.columns
        for op, identity in zip(columns.templates, columns.identity_of, strict=True):
            task = columns.identity("B", op.stage, None)
            if op.kind == "R" and task >= 0:
                nodes = columns.table[identity]
                found[nodes[nodes >= 0]] = columns.table[task][nodes >= 0]
        return found


def _distinct(needs: Sequence[tuple[Numbers, Numbers]], nodes: int, resources: int) -> tuple[Numbers, Numbers, Numbers]:
    """Sorts needs by node, those of a node in the order in which they were added; what is added twice counts once."""
    owner, needed = (np.concatenate(one) for one in zip(*needs, strict=True))
    if sum(len(added) > 0 for added, _ in needs) > 1:
        _, first = np.unique(owner * resources + needed, return_index=True)
        first = np.sort(first)
        owner, needed = owner[first], needed[first]
    order = np.argsort(owner, kind="stable")
    owner, needed = owner[order], needed[order]
    return np.searchsorted(owner, np.arange(nodes + 1)), needed, owner
