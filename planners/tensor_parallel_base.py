"""Shared base of the tensor-parallel planners: chain and costs of a model, and the plan of a route."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import islice
from typing import Any

import numpy as np

from harness.checks.plan_fits import too_little_memory
from harness.core import divisors
from harness.core.activation_checkpointing import checkpointed
from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan
from harness.core.problem import Fix, NoPlan, Problem
from harness.core.units import sizes
from harness.interfaces import BatchShape, PlanRequest
from harness.sbp import baselines
from harness.sbp.collective_costs import Collectives, grid_from_cluster
from harness.sbp.device_grid import Strategy, Summa
from harness.sbp.matmul_chain import Chain, chain_from_profile
from harness.sbp.memory_limit import TooLarge, held
from harness.sbp.route_to_plan import device_share, matmul_figures, with_exchanges, with_route
from harness.sbp.shortest_path import Ends, Infeasible, Route, Search
from harness.sbp.strategy_costs import INFINITE, Costs, Rules
from harness.simulator.memory_timeline import working_bytes
from planners import block_partition, pipeline, stage_costs
from planners.memory_bisection import cheapest_that_fits

EXCHANGES = (1, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32)
"""Limits of what one matmul's exchanges of gradients may need, as shares of the most that any needs. A smaller one
leaves more for weights and activations, and excludes strategies."""
ENDS: tuple[Ends, ...] = ("free", "batch_split")
GB = 1e9
Find = Callable[["SplitProblem"], Route]
"""A planner's search. Raises Infeasible."""
Routes = Callable[[Chain, Costs, Ends], list[Route]]
"""The few routes of a planner that searches for none. Raises Infeasible where there is none."""
Works = Callable[[int, int, int], bool]
"""Whether there is a plan with these samples of a micro-batch, samples of a batch, and devices."""
NEAR = 16
"""So many numbers of devices below the one that is asked for are tried, and those that divide it."""


@dataclass(frozen=True)
class SplitProblem:
    """The matmuls of a model on the devices of a stage, and what splitting them costs.

    A device has `available` bytes; `needed` returns those that it needs. A search keeps within `limit` bytes of what it
    decides: weights with their state, and inputs of matmuls.
    """

    chain: Chain
    costs: Costs
    available: float
    needed: Callable[[Route], float]
    limit: float
    known: dict[tuple[Routes, Ends, Rules], list[baselines.Made]] = field(
        default_factory=dict, compare=False, repr=False
    )
    """Routes that were made, which many limits choose from; of this chain and these costs, but for their rules."""
    searches: dict[tuple[Ends, Rules, bool], Search] = field(default_factory=dict, compare=False, repr=False)
    """Searches that were begun, which know what does not depend on a limit; as `known` of one chain."""

    @property
    def evenly(self) -> float:
        """Bytes of weights and inputs on a device if all are split evenly."""
        chain, grid = self.chain, self.costs.grid
        state = self.costs.state_bytes({item.tied or item.name: item for item in chain.matmuls}.values())
        inputs = sum(item.input_elements * chain.element_bytes for item in chain.matmuls if not item.look_up)
        return (state + inputs) / grid.size(grid.all)

    def search(self, ends: Ends, repeat: bool = False) -> Search:
        """Return a search for the cheapest route, with layouts of input and output as in `ends`."""
        key = ends, self.costs.rules, repeat
        if key not in self.searches:
            self.searches[key] = Search(self.chain, self.costs, ends, repeat=repeat)
        return self.searches[key]

    def cheapest(self, routes: Routes, ends: Ends) -> Route:
        """Returns the cheapest of a few routes. Raises TooLarge where none fits, Infeasible where there is none."""
        rules = replace(self.costs.rules, exchange_bytes=INFINITE)
        key = routes, ends, rules
        if key not in self.known:
            free = replace(self, costs=replace(self.costs, rules=rules))
            found = routes(free.chain, free.costs, ends)
            self.known[key] = [baselines.Made.of(route, free.search(ends)) for route in found]
        return baselines.cheapest(self.known[key], self.limit, self.costs.rules.exchange_bytes)

    def fitting(self, find: Find, ends: Ends) -> Route:
        """Returns the cheapest route that fits of those found with several limits of exchanges (`EXCHANGES`), or the
        cheapest of all if it fits. Raises Infeasible, or TooLarge with all bytes that are needed."""
        try:
            route = find(replace(self, limit=self.available))
            if self.needed(route) <= self.available:
                return route
        except TooLarge:
            pass
        best, least, search, most = None, float("inf"), self.search(ends), self._largest_exchange
        for share in EXCHANGES:
            rules = replace(self.costs.rules, exchange_bytes=share * most)
            limited = cache(partial(self._with_rules, rules, find))
            try:
                if best and limited(self.available).seconds >= best.seconds:
                    break  # as will be those with less
                route = cheapest_that_fits(self.available, limited, self.needed, lambda one: held(one, search))
            except TooLarge as error:
                least = min(least, error.least)
            except (Infeasible, NoPlan):  # no strategy needs so little
                continue
            else:
                best = min(best or route, route, key=lambda one: one.seconds)
        if best is None:
            raise TooLarge(least)
        return best

    def _with_rules(self, rules: Rules, find: Find, limit: float) -> Route:
        return find(replace(self, costs=replace(self.costs, rules=rules), limit=limit))

    @property
    def _largest_exchange(self) -> float:
        """The most bytes that one matmul's exchanges need, with any strategy."""
        costs, different = self.costs, {item.nameless for item in self.chain.matmuls}
        needs = (costs.exchange_bytes(item, one) for item in different for one in costs.strategies(item))
        return max(needs, default=0.0)


def split_problem(
    profile: ModelProfile,
    cluster: Cluster,
    memory: MemoryModel,
    request: PlanRequest,
    rules: Rules,
    memory_gb: float | None = None,
) -> SplitProblem:
    """Returns the split problem of a request; `memory_gb` replaces a device's memory.

    Of several stages each holds its part of the weights, and the first one as many micro-batches as there are stages:
    together the inputs of all matmuls once. Raises NoPlan where devices do not fill whole nodes, or the model has no
    matmuls.
    """
    pipeline.check_request(profile, request)
    try:
        grid = grid_from_cluster(cluster, request.tensor)
    except ValueError as error:
        message = f"is no whole number of nodes of {cluster.devices_per_node} devices"
        whole: Fix = {"mesh.tensor": math.gcd(request.tensor, cluster.devices_per_node)}
        raise NoPlan(Problem("mesh.tensor", request.tensor, message, (whole,))) from error
    try:
        chain = chain_from_profile(profile)
    except ValueError as error:
        fix: Fix = {"planner": "balance"} | ({"mesh.tensor": 1} if request.tensor > 1 else {})
        raise NoPlan(Problem("model", profile.model, str(error), (fix,))) from error
    state = (memory.weights * memory.versions + memory.gradients + memory.optimizer) / request.pipeline
    costs = Costs(
        Collectives(cluster, grid),
        chain.element_bytes,
        request.batch.micro_batches,
        rules,
        state,
        keeps=request.recompute == "never",
        trained_state=(memory.gradients + memory.optimizer) / request.pipeline,
    )
    available = memory.available_bytes(cluster.device.memory_bytes) if memory_gb is None else memory_gb * GB
    even = cache(lambda: pipeline.to_plan(_cut(profile, cluster, request), request, {}))  # many requests have no route

    @cache  # a search meets the same strategies with many limits
    def needed_with(chosen: tuple[tuple[str, Strategy | Summa], ...]) -> float:
        strategy = {name: grid.numbers(one) for name, one in chosen}
        return _needed(profile, memory, chain, replace(even(), strategy=strategy))

    def needed(route: Route) -> float:
        """Return the bytes that a device needs with this route."""
        return needed_with(tuple(route.strategies.items()))

    return SplitProblem(chain, costs, available, needed, available)


def _needed(profile: ModelProfile, memory: MemoryModel, chain: Chain, plan: Plan) -> float:
    """Returns the bytes that a device needs, on the stage where that is most.

    A stage has as many micro-batches in flight as there are stages from it to the last. Recomputation is layer by
    layer.
    """
    share, count = device_share(profile, plan, chain), len(plan.stages)
    share = with_exchanges(share, plan, chain)
    share = share if plan.recompute == "never" else checkpointed(share, plan, "1")
    accumulated = min(1.0, memory.gradients) if plan.micro_batches > 1 else 0.0
    bytes_of_stages = []
    for number, stage in enumerate(plan.stages):
        first, last, inside = stage.first, stage.last, min(count - number, plan.micro_batches)
        entering = plan.micro_batches * share.input_bytes if number == 0 else inside * share.boundary_bytes(first)
        leaving = share.layers[last].output_bytes
        kept = inside * memory.task_bytes(share, first, last) + entering + leaving
        state = memory.state_bytes(share, first, last)
        bytes_of_stages.append(state + kept + working_bytes(share, first, last, accumulated))
    return max(bytes_of_stages)


def plan_matmuls(
    profile: ModelProfile,
    cluster: Cluster,
    memory: MemoryModel,
    request: PlanRequest,
    rules: Rules,
    find: Find,
    ends: Ends = "free",
    memory_gb: float | None = None,
    exists: Find | None = None,
) -> Plan:
    """Returns the plan with the route of `find`. `exists` is a faster check for a route, used for fixes.

    Raises NoPlan where nothing divides, or nothing fits, with fixes.
    """
    problem = split_problem(profile, cluster, memory, request, rules, memory_gb)
    try:
        return to_plan(problem, problem.fitting(find, ends), profile, cluster, request, ends)
    except Infeasible as error:

        def works(samples: int, size: int, tensor: int) -> bool:
            """Return whether this micro-batch, batch and tensor parallel size have a plan."""
            shape = BatchShape(size, size // request.data // samples)
            changed = replace(request, batch=shape, tensor=tensor)
            try:
                other = split_problem(profile.for_samples(samples), cluster, memory, changed, rules, memory_gb)
                other.fitting(exists or find, ends)
            except (Infeasible, NoPlan):
                return False
            return True

        problem.known.clear()
        problem.searches.clear()  # a search keeps what it refuses, with the fixes that nobody may ask for
        most = memory.available_bytes(cluster.device.memory_bytes)
        raise none(problem, error, request, works, memory_gb, cluster, most) from error


def to_plan(
    problem: SplitProblem, route: Route, profile: ModelProfile, cluster: Cluster, request: PlanRequest, ends: Ends
) -> Plan:
    """Returns the plan; `predicted` has the communication of a step in all, by phase and by matmul, and of
    baselines where the request asks for them."""
    plan = pipeline.to_plan(_cut(profile, cluster, request), request, {})
    plan = with_route(plan, route, problem.costs, profile, ends)
    figures = matmul_figures(route, problem.costs)
    recompute_s = request.batch.micro_batches * sum(
        traffic.seconds for stage in plan.traffic for traffic in stage if traffic.phase == "recompute"
    )
    phases = total(figures, "seconds") | ({"recompute": recompute_s} if recompute_s else {})
    predicted = {"communication_s": route.seconds + recompute_s, "communication_by_phase_s": phases}
    predicted |= {"held_bytes": round(held(route, problem.search(ends))), "products": figures}
    if request.compares:
        predicted["baselines"] = compare_baselines(problem, ends)
    return replace(plan, predicted=predicted)


def compare_baselines(problem: SplitProblem, ends: Ends) -> dict[str, dict[str, Any]]:
    """Returns what the paper's baselines communicate and hold, or "why" they are not possible."""
    results: dict[str, dict[str, Any]] = {}
    plain = replace(problem, costs=replace(problem.costs, rules=Rules()))
    for name, routes in (("megatron", baselines.megatron), ("data_parallel", baselines.data_parallel)):
        try:
            route = plain.fitting(partial(SplitProblem.cheapest, routes=routes, ends=ends), ends)
        except TooLarge as error:
            results[name] = {"why": f"does not fit: {_needs(error, plain)}"}
        except Infeasible as error:
            results[name] = {"why": _unsplit(plain, error)}
        else:
            figures = matmul_figures(route, plain.costs)
            results[name] = {
                "communication_s": route.seconds,
                "communication_by_phase_s": total(figures, "seconds"),
                "bytes": total(figures, "bytes"),
                "held_bytes": round(held(route, plain.search(ends))),
            }
    return results


def total(figures: dict[str, dict[str, Any]], figure: str) -> dict[str, float]:
    """Returns the sum over matmuls of one figure that has several parts."""
    sums: dict[str, float] = {}
    for of_matmul in figures.values():
        for part, value in of_matmul[figure].items():
            sums[part] = sums.get(part, 0) + value
    return sums


def _cut(profile: ModelProfile, cluster: Cluster, request: PlanRequest) -> list[int]:
    """Returns stages of equal time where times are known, else of equal numbers of layers."""
    count = len(request.devices)
    if count == 1 or not any(layer.forward_s for layer in profile.layers):
        return block_partition.even(len(profile.layers), count)
    return block_partition.exact(stage_costs.by_time(profile, cluster, request).stages, stage_costs.sent_bytes(profile))


# -- why there is none, and what would fix it -------------------------------------------------------------------------


def none(
    problem: SplitProblem,
    error: Infeasible,
    request: PlanRequest,
    works: Works,
    memory_gb: float | None,
    cluster: Cluster,
    most: float,
) -> NoPlan:
    """Returns the reason: too little memory (devices have `most`), or what cannot be split; with at most two tried
    fixes."""
    if isinstance(error, TooLarge):
        least, memory_problem = error.least, too_little_memory(_needs(error, problem))
        if memory_gb is not None:
            memory_problem = replace(memory_problem, key="planner.memory_gb", value=memory_gb)

        def smaller() -> list[Fix]:
            """Return fixes that need less memory."""
            fixes = _more_micro_batches(problem, request, works)
            if memory_gb is not None and least <= most:
                fixes[:0] = [{"planner.memory_gb": float(f"{least / GB * 1.001:.4g}")}]
            return fixes

        return NoPlan(replace(memory_problem, hint="more devices"), smaller)

    def divisible() -> list[Fix]:
        """Return fixes with which the matmuls divide evenly."""
        fixes = [*_fewer_micro_batches(problem, request, works), *_larger_batch(problem, request, works),
                 *_fewer_devices(problem, request, works, cluster)]  # fmt: skip
        return fixes[:2]

    return NoPlan(Problem("mesh.tensor", request.tensor, _unsplit(problem, error)), divisible)


def _needs(error: TooLarge, problem: SplitProblem) -> str:
    least, available = sizes(round(error.least), round(problem.available))
    return f"needs at least {least}, there are {available}"


def _unsplit(problem: SplitProblem, error: Infeasible) -> str:
    """Returns what cannot be split: attention, or a matmul, or else the message of the search."""
    for attention in problem.chain.attentions if len(error.matmuls) != 1 else ():
        if not np.isfinite(problem.costs.attended(attention)).any():
            return f"cannot split attention ({attention.heads} heads, {_counted(attention.samples)})"
    item = next((matmul for matmul in problem.chain.matmuls if matmul.name in error.matmuls), None)
    if item is None:
        return f"has no strategies: {error}"
    detail = ", of which alone it is split" if item.whole else f", {item.inputs} x {item.outputs}"
    return f"cannot split {error} ({_counted(item.samples)}{detail})"


def _counted(samples: int) -> str:
    return f"{samples} sample{'s' * (samples > 1)} in a micro-batch"


def _samples(problem: SplitProblem) -> int:
    return problem.chain.matmuls[0].samples


def _more_micro_batches(problem: SplitProblem, request: PlanRequest, works: Works) -> list[Fix]:
    """Returns the smallest number of micro-batches that works."""
    samples, size = _samples(problem), request.batch.size
    fewer = [n for n in reversed(divisors.list_divisors(samples)) if n < samples]
    good: Iterator[Fix] = (
        {"batch.micro_batches": size // request.data // n} for n in fewer if works(n, size, request.tensor)
    )
    return list(islice(good, 1))


def _fewer_micro_batches(problem: SplitProblem, request: PlanRequest, works: Works) -> list[Fix]:
    """Returns the largest number of micro-batches that works."""
    samples, size = _samples(problem), request.batch.size
    more = [n for n in divisors.list_divisors(size // request.data) if n > samples and n % samples == 0]
    good: Iterator[Fix] = (
        {"batch.micro_batches": size // request.data // n} for n in more if works(n, size, request.tensor)
    )
    return list(islice(good, 1))


def _larger_batch(problem: SplitProblem, request: PlanRequest, works: Works) -> list[Fix]:
    """Returns the next batch size that gives all devices equal samples."""
    samples, devices = _samples(problem), request.tensor
    wanted = -(-samples // devices) * devices
    size = wanted * request.batch.micro_batches * request.data
    return [{"batch.size": size}] if wanted > samples and works(wanted, size, devices) else []


def _fewer_devices(problem: SplitProblem, request: PlanRequest, works: Works, cluster: Cluster) -> list[Fix]:
    """Returns the most devices that work, equally on nodes; replicas stay where more do not divide the batch."""
    samples, size, tensor = _samples(problem), request.batch.size, request.tensor
    fewer = {*divisors.list_divisors(tensor)[:-1], *range(max(1, tensor - NEAR), tensor)}
    for n in sorted(filter(cluster.places_equally, fewer), reverse=True):
        if works(samples, size, n):
            room = max(1, cluster.devices // (n * request.pipeline))
            fills = room == request.data or size % (room * request.batch.micro_batches) == 0
            return [{"mesh.tensor": n} | ({} if fills else {"mesh.data": request.data})]
    return []
