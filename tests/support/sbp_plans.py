"""Plans for tests of the sbp engine: with strategies that are given, drawn, or the planner's own."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from math import prod

from harness.core.cluster import Cluster, Device, Link
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Mesh, Plan
from harness.interfaces import BatchShape, Model, PlanRequest
from harness.measure.count_model import count
from harness.sbp import baselines
from harness.sbp.collective_costs import Collectives, grid_from_cluster
from harness.sbp.device_grid import Strategy
from harness.sbp.matmul_chain import chain_from_profile
from harness.sbp.route_to_plan import with_route
from harness.sbp.shortest_path import Ends, Infeasible, Search
from harness.sbp.strategy_costs import Costs, Rules
from planners.autoddl.planner import Config, build

ALPHA_S = 1e-5
TRIES = 60


def flat(devices: int, alpha_s: float = ALPHA_S, nodes: int = 1) -> Cluster:
    link = Link(alpha_s, 1e-9)
    return Cluster("flat", nodes, devices // nodes, Device(memory_bytes=10**12), intra=link, node_port=link)


def costs_of(profile: ModelProfile, cluster: Cluster, micro_batches: int) -> Costs:
    grid, width = grid_from_cluster(cluster, cluster.devices), chain_from_profile(profile).element_bytes
    return Costs(Collectives(cluster, grid), width, micro_batches, Rules())


def with_strategies(
    profile: ModelProfile, cluster: Cluster, given: Mapping[str, Strategy], ends: Ends, micro_batches: int = 1
) -> Plan:
    """The cheapest plan with these strategies; products that are not given have what goes best with them.

    Raises Infeasible.
    """
    costs = costs_of(profile, cluster, micro_batches)
    route = Search(chain_from_profile(profile), costs, ends, given).route()
    plan = Plan.contiguous([len(profile.layers)], micro_batches)
    return with_route(replace(plan, mesh=Mesh(tensor=cluster.devices)), route, costs, profile, ends)


def on_mesh(
    model: Model, mesh: tuple[int, ...], samples: int, micro_batches: int = 1, nodes: int = 1, dtype: str = "float64",
    autocast: str | None = None,
) -> Plan:  # fmt: skip
    """SUMMA's plan on one mesh, as `Plan.strategy` has it."""
    profile = count(model, samples // micro_batches, dtype, autocast)
    cluster = flat(prod(mesh), nodes=nodes)
    costs = costs_of(profile, cluster, micro_batches)
    plan = replace(Plan.contiguous([len(profile.layers)], micro_batches), mesh=Mesh(tensor=cluster.devices))
    routes = baselines.summa(chain_from_profile(profile), costs, "free")
    plans = [with_route(plan, route, costs, profile, "free") for route in routes]
    return next(plan for plan in plans if mesh in plan.strategy.values())


def drawn(
    profile: ModelProfile, devices: int, ends: Ends, micro_batches: int, dice: random.Random, share: float = 0.6,
    nodes: int = 1,
) -> Plan:  # fmt: skip
    """Random strategies for a share of the products, on links of random latency."""
    cluster = flat(devices, 10 ** dice.uniform(-7, -4), nodes)
    costs = costs_of(profile, cluster, micro_batches)
    allowed = {item.name: costs.strategies(item) for item in chain_from_profile(profile).matmuls}
    for _ in range(TRIES):
        given = {name: dice.choice(some) for name, some in allowed.items() if dice.random() < share}
        try:
            return with_strategies(profile, cluster, given, ends, micro_batches)
        except Infeasible:
            continue
    raise AssertionError(f"{TRIES} draws of strategies, none of which fit together")


def planned(
    model: Model, devices: int, samples: int, ends: Ends, micro_batches: int = 1, dtype: str = "float64",
    alpha_s: float = ALPHA_S, autocast: str | None = None,
) -> Plan:  # fmt: skip
    """As planner=autoddl plans."""
    profile = count(model, samples // micro_batches, dtype, autocast)
    request = PlanRequest(BatchShape(samples, micro_batches), 1, 1, devices)
    return build(Config(ends=ends)).plan(profile, flat(devices, alpha_s), MemoryModel(), request)
