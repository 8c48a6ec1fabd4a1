"""What each op costs on a cluster if nothing else runs: seconds of tasks, routes of messages and collectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from harness.core.cluster import Cluster
from harness.core.op import Op
from harness.schedule import Schedule
from harness.schedule.optimizer_chunks import copy_direction
from harness.simulator.op_durations import TaskCosts
from harness.simulator.routes import Route, Routes


class Prices:
    """Prices of one schedule. `slow` has devices of the pipeline, and how many times as long their tasks take.

    Raises CannotRun where the cluster has no place for all replicas.
    """

    def __init__(self, schedule: Schedule, cluster: Cluster, costs: TaskCosts, slow: Mapping[int, float]) -> None:
        self.schedule, self.cluster, self.costs, self.slow = schedule, cluster, costs, slow
        self.routes = Routes(schedule, cluster)

    @cached_property
    def seconds(self) -> Mapping[str, list[float]]:
        """Those of tasks, by kind and stage."""
        return self.costs.seconds

    def task_s(self, op: Op, split: bool) -> float:
        """Returns the seconds of a task; `split` says whether the gradients of its weights are one of their own."""
        if op.kind == "step" and op.part:
            return self.costs.chunk_s(op.stage, op.bytes) * self.factor(op)
        task = "I" if split and op.kind == "B" else op.kind
        return self.seconds[task][op.stage] * self.factor(op)

    def beginning_s(self, op: Op) -> float:
        """Returns what passes once in a step before a device's first task; nothing for any other one."""
        devices = self.schedule.devices
        begins = op.kind == "F" and op.micro_batch == 0 and devices.index(devices[op.stage]) == op.stage
        return self.cluster.engine_costs.step_s * self.factor(op) if begins else 0.0

    def message(self, op: Op) -> Route:
        """Returns the route of a copy, or of a send with its receive."""
        if copy_direction(op)[0]:
            return Route(self.costs.bucket_s(op.bytes))
        return self.routes.message(op)

    def collective(self, op: Op, members: list[int]) -> Route:
        """Returns what is left of a collective of some devices next to a task, with what the engine takes for it."""
        return self.called(op, self.exposed(op, self.routes.collective(op, members)))

    @cached_property
    def call_s(self) -> float:
        """What the engine takes for each call of a collective."""
        return self.cluster.engine_costs.of("collective").base_s

    def called(self, op: Op, route: Route) -> Route:
        """The route with what the engine takes for its calls."""
        return replace(route, seconds=route.seconds + self.call_s * op.calls) if self.call_s else route

    def factor(self, op: Op) -> float:
        """Returns how many times as long the tasks of an op's device take as those of the others."""
        return self.slow.get(self.schedule.devices[op.stage], 1.0)

    def exposed(self, op: Op, route: Route) -> Route:
        """What is left of a collective's calls when they run while a task computes: the first or the last of them, what
        takes longer than the task, and what the kernels of both lose to each other. CPU devices wait for each call.

        F          |===layer 0===|===layer 1===|===layer 2===|
        gathers  |0|1|2|                          here the first one is exposed, and 1 - `overlap` of 1 and 2
        """
        if op.overlaps is None or self.cluster.cores:
            return route
        kind, share = op.overlaps
        whole_s = self.alone_s(route)
        task_s = self.seconds[kind][op.stage] * self.factor(op)
        covered_s = min(share * task_s, whole_s) * (1 - 1 / op.calls)
        hidden_s = self.cluster.overlap * covered_s
        left = 1 - hidden_s / whole_s if whole_s else 1.0
        flow = replace(route.flow, amount=route.flow.amount * left) if route.flow else None
        return replace(route, seconds=route.seconds * left, flow=flow)

    def alone_s(self, route: Route) -> float:
        """Returns what a route takes if nothing else crosses the ports but what its counterparts send."""
        if route.flow is None:
            return route.seconds
        port = 1 / self.cluster.node_port.beta_s_per_byte
        alone = 1 / self.cluster.alone_s_per_byte
        shares = (alone if uses == 1 else port / uses for uses in route.flow.uses.values())
        rate = min([route.flow.cap, *shares])
        return route.seconds + route.flow.amount / rate
