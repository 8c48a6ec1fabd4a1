"""What every planner of matrix products needs: the chain and its costs before, the plan after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from harness import divisors
from harness.checkpointing import checkpointed
from harness.cluster import Cluster
from harness.display import sizes
from harness.interfaces import BatchShape, PlanRequest
from harness.memory import MemoryModel
from harness.plan import Plan
from harness.problem import NoPlan
from harness.profile import ModelProfile
from harness.sbp import baselines
from harness.sbp.chain import Chain, chain_of
from harness.sbp.collectives import Collectives, grid_of
from harness.sbp.costs import Costs, Rules
from harness.sbp.limit import TooLarge, held
from harness.sbp.optimum import Ends, Infeasible, Route, Search
from harness.sbp.planned import of_device, per_product, with_route
from harness.simulate.ledger import working_bytes
from planners import blocks, stage_costs, stages
from planners.fitting import fitting

ENDS: tuple[Ends, ...] = ("free", "batch_split")
GB = 1e9
Find = Callable[["Products"], Route]
"""A planner's own search. Raises Infeasible."""
Works = Callable[[int, int, int], bool]
"""Whether there is a plan with so many samples in a micro-batch, in a batch, and devices."""


@dataclass(frozen=True)
class Products:
    """The products of a model on the devices of a stage, and what splitting them costs.

    A device has `there` bytes; `needed` are those that it needs. A search keeps to `limit` bytes of what it decides:
    weights with their state, and inputs of products.
    """

    chain: Chain
    costs: Costs
    there: float
    needed: Callable[[Route], float]
    limit: float

    @property
    def evenly(self) -> float:
        """Bytes that a device holds of weights and inputs if all of it is shared evenly."""
        chain, grid = self.chain, self.costs.grid
        weights = {item.tied or item.name: item.weight_bytes for item in chain.matmuls}
        inputs = sum(item.input_elements * chain.element_bytes for item in chain.matmuls if not item.look_up)
        return (self.costs.state * sum(weights.values()) + inputs) / grid.size(grid.all)

    def search(self, ends: Ends, **more: Any) -> Search:
        return Search(self.chain, self.costs, ends, **more)

    def fitting(self, find: Find, ends: Ends) -> Route:
        """The cheapest route that fits. Raises Infeasible, TooLarge with all that is needed."""
        search = self.search(ends)
        return fitting(
            self.there, lambda limit: find(replace(self, limit=limit)), self.needed, lambda route: held(route, search)
        )


def products(
    profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest, rules: Rules,
    memory_gb: float | None = None,
) -> Products:  # fmt: skip
    """`memory_gb` stands for a device's memory. Raises NoPlan where devices fill no whole nodes, or the model has no
    products.

    Of several stages each holds its part of the weights, and the first one as many micro-batches as there are stages:
    together the inputs of all products once.
    """
    stages.check_request(profile, request)
    try:
        grid, chain = grid_of(cluster, request.tensor), chain_of(profile)
    except ValueError as error:
        key = f"mesh.tensor {request.tensor}" if "devices" in str(error) else f"model {profile.model}"
        raise NoPlan(key, str(error), f"mesh.tensor={cluster.devices_per_node}") from error
    state = (memory.weights * memory.versions + memory.gradients + memory.optimizer) / request.pipeline
    costs = Costs(Collectives(cluster, grid), chain.element_bytes, request.batch.micro_batches, rules, state,
                  keeps=request.recompute == "never")  # fmt: skip
    there = cluster.device.memory_bytes - memory.reserve_bytes if memory_gb is None else memory_gb * GB
    even = stages.to_plan(_cut(profile, cluster, request), request, {})

    def needed(route: Route) -> float:
        strategy = {name: grid.numbers(one) for name, one in route.strategies.items()}
        return _needed(profile, memory, chain, replace(even, strategy=strategy))

    return Products(chain, costs, there, needed, there)


def _needed(profile: ModelProfile, memory: MemoryModel, chain: Chain, plan: Plan) -> float:
    """Bytes that a device needs, on the stage where that is most; a stage has as many micro-batches in it as there are
    stages from it to the last. What is recomputed is so layer by layer."""
    share, count = of_device(profile, plan, chain), len(plan.stages)
    share = share if plan.recompute == "never" else checkpointed(share, plan, "1")
    accumulated = min(1.0, memory.gradients) if plan.micro_batches > 1 else 0.0
    found = []
    for number, stage in enumerate(plan.stages):
        first, last, inside = stage.first, stage.last, min(count - number, plan.micro_batches)
        entering = plan.micro_batches * share.input_bytes if number == 0 else inside * share.boundary_bytes(first)
        leaving = share.layers[last].output_bytes
        kept = inside * memory.task_bytes(share, first, last) + entering + leaving
        state = memory.state_bytes(share, first, last)
        found.append(state + kept + working_bytes(share, first, last, accumulated))
    return max(found)


def planned(
    profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest, rules: Rules, find: Find,
    ends: Ends = "free", memory_gb: float | None = None, exists: Find | None = None,
) -> Plan:  # fmt: skip
    """The plan with the route that `find` finds. `exists` is quicker and tells whether there is one, for mends.

    Raises NoPlan where nothing divides, or nothing fits, with what would.
    """
    found = products(profile, cluster, memory, request, rules, memory_gb)
    try:
        return to_plan(found, found.fitting(find, ends), profile, cluster, request, ends)
    except Infeasible as error:

        def works(samples: int, size: int, tensor: int) -> bool:
            shape = BatchShape(size, size // request.data // samples)
            asked = replace(request, batch=shape, tensor=tensor)
            try:
                other = products(profile.of_samples(samples), cluster, memory, asked, rules, memory_gb)
                other.fitting(exists or find, ends)
            except (Infeasible, NoPlan):
                return False
            return True

        most = cluster.device.memory_bytes - memory.reserve_bytes
        raise none(found, error, request, works, memory_gb, most) from error


def to_plan(
    found: Products, route: Route, profile: ModelProfile, cluster: Cluster, request: PlanRequest, ends: Ends
) -> Plan:
    """The plan; `predicted` has what a step communicates, in all, by phase and by product, and what others would."""
    plan = stages.to_plan(_cut(profile, cluster, request), request, {})
    plan = with_route(plan, route, found.costs, profile, ends)
    own = per_product(route, found.costs)
    again = request.batch.micro_batches * sum(
        one.seconds for stage in plan.traffic for one in stage if one.phase == "recompute"
    )
    phases = total(own, "seconds") | ({"recompute": again} if again else {})
    told = {"communication_s": route.seconds + again, "communication_by_phase_s": phases}
    told |= {"held_bytes": round(held(route, found.search(ends))), "products": own}
    return replace(plan, predicted=told | {"baselines": compared(found, ends)})


def compared(found: Products, ends: Ends) -> dict[str, dict[str, Any]]:
    """What the paper's baselines communicate and hold, or "why" they cannot."""
    told: dict[str, dict[str, Any]] = {}
    plain = replace(found, costs=replace(found.costs, rules=Rules()))
    for name, find in (("megatron", baselines.megatron), ("data_parallel", baselines.data_parallel)):
        try:
            route = plain.fitting(partial(_baseline, find, ends), ends)
        except TooLarge as error:
            told[name] = {"why": f"does not fit: {_needs(error, plain)}"}
        except Infeasible as error:
            told[name] = {"why": _unsplit(plain, error)}
        else:
            own = per_product(route, plain.costs)
            told[name] = {"communication_s": route.seconds, "communication_by_phase_s": total(own, "seconds"),
                          "bytes": total(own, "bytes"),
                          "held_bytes": round(held(route, plain.search(ends)))}  # fmt: skip
    return told


def _baseline(find: Callable[..., Route], ends: Ends, found: Products) -> Route:
    return find(found.chain, found.costs, ends, limit=found.limit)


def total(own: dict[str, dict[str, Any]], figure: str) -> dict[str, float]:
    """The sum over products of one figure that has several parts."""
    found: dict[str, float] = {}
    for one in own.values():
        for part, value in one[figure].items():
            found[part] = found.get(part, 0) + value
    return found


def _cut(profile: ModelProfile, cluster: Cluster, request: PlanRequest) -> list[int]:
    """Stages of equal time where times are known, else of equal numbers of layers."""
    count = len(request.devices)
    if count == 1 or not any(layer.forward_s for layer in profile.layers):
        return blocks.even(len(profile.layers), count)
    return blocks.exact(stage_costs.by_time(profile, cluster, request).stages, stage_costs.sent_bytes(profile))


# -- why there is none, and what would mend it ------------------------------------------------------------------------


def none(
    found: Products, error: Infeasible, request: PlanRequest, works: Works, memory_gb: float | None, most: float
) -> NoPlan:
    """Too little memory (devices have `most`), or what cannot be split; with what was tried and works."""
    if isinstance(error, TooLarge):
        least = error.least

        def smaller() -> str:
            mends = [*_more_micro_batches(found, request, works), "more devices"]
            if memory_gb is not None and least <= most:
                mends[:0] = [f"planner.memory_gb={least / GB * 1.001:.4g}"]
            return ", or ".join(mends[:2])

        key = "a device's memory" if memory_gb is None else f"planner.memory_gb {memory_gb:g}"
        return NoPlan(key, _needs(error, found), smaller)

    def divisible() -> str:
        mends = [*_fewer_micro_batches(found, request, works), *_larger_batch(found, request, works),
                 *_fewer_devices(found, request, works)]  # fmt: skip
        return ", or ".join(mends[:2])

    return NoPlan(f"mesh.tensor {request.tensor}", _unsplit(found, error), divisible)


def _needs(error: TooLarge, found: Products) -> str:
    least, there = sizes(round(error.least), round(found.there))
    return f"needs at least {least}, there are {there}"


def _unsplit(found: Products, error: Infeasible) -> str:
    """What cannot be split: attention, or a product, or else what the search says."""
    names = [one.name for one in found.chain.matmuls]
    for one in found.chain.attentions if str(error) not in names else ():
        if not np.isfinite(found.costs.attended(one)).any():
            return f"cannot split attention ({one.heads} heads, {_counted(one.samples)})"
    item = next((one for one in found.chain.matmuls if str(error).startswith(one.name)), None)
    if item is None:
        return f"has no strategies: {error}"
    more = ", of which alone it is split" if item.whole else f", {item.inputs} x {item.outputs}"
    return f"cannot split {error} ({_counted(item.samples)}{more})"


def _counted(samples: int) -> str:
    return f"{samples} sample{'s' * (samples > 1)} in a micro-batch"


def _samples(found: Products) -> int:
    return found.chain.matmuls[0].samples


def _more_micro_batches(found: Products, request: PlanRequest, works: Works) -> list[str]:
    """The fewest that work."""
    samples, size = _samples(found), request.batch.size
    fewer = [n for n in reversed(divisors.of(samples)) if n < samples]
    good = (f"batch.micro_batches={size // request.data // n}" for n in fewer if works(n, size, request.tensor))
    return list(islice(good, 1))


def _fewer_micro_batches(found: Products, request: PlanRequest, works: Works) -> list[str]:
    """The most that work."""
    samples, size = _samples(found), request.batch.size
    more = [n for n in divisors.of(size // request.data) if n > samples and n % samples == 0]
    good = (f"batch.micro_batches={size // request.data // n}" for n in more if works(n, size, request.tensor))
    return list(islice(good, 1))


def _larger_batch(found: Products, request: PlanRequest, works: Works) -> list[str]:
    """The next one of which all devices have as many samples."""
    samples, devices = _samples(found), request.tensor
    wanted = -(-samples // devices) * devices
    size = wanted * request.batch.micro_batches * request.data
    return [f"batch.size={size}"] if wanted > samples and works(wanted, size, devices) else []


def _fewer_devices(found: Products, request: PlanRequest, works: Works) -> list[str]:
    samples, size = _samples(found), request.batch.size
    fewer = (n for n in range(request.tensor - 1, 0, -1) if request.tensor % n == 0)
    return list(islice((f"mesh.tensor={n}" for n in fewer if works(samples, size, n)), 1))
