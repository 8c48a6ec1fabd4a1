"""The search on plans: what it promises is what the simulator says, within the memory of the devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.core.cluster import Cluster, Device, Link
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile, Skip
from harness.core.plan import Mesh, Plan, Stage
from harness.core.problem import ProblemError
from harness.order_search.chain import Chain, evaluate
from harness.order_search.plan_chain import Judge, chain_of, families, of_chain, searched
from harness.schedule import Schedule, plan_order
from harness.schedule.families import FAMILIES
from harness.schedule.transfers import Transfer, plan_transfers
from harness.simulator import simulate

LAYERS = tuple(
    LayerProfile(f"layer{k}", 0.01 * (1 + k % 3), 0.02 * (1 + (k + 1) % 3), param_bytes=1000, output_bytes=2000,
                 saved_bytes=5000 + 1000 * k)
    for k in range(6)
)  # fmt: skip
PROFILE = ModelProfile(LAYERS, input_bytes=2000, skips=(Skip(0, 5, 4000, "up"),))
PLAN = Plan(Mesh(pipeline=3), (Stage(0, 1, 0), Stage(2, 3, 1), Stage(4, 5, 2)), 6)
ONE = replace(PLAN, micro_batches=1)
MEMORY = MemoryModel(messages="posted")


def cluster(memory_bytes: int = 0) -> Cluster:
    return Cluster(devices_per_node=3, device=Device("D", memory_bytes), intra=Link(1e-3, 1e-7))


def predicted(plan: Plan, memory_bytes: int = 0) -> tuple[float, list[int]]:
    figures = simulate(schedule_of(plan), plan, PROFILE, cluster(memory_bytes), MEMORY).figures
    return figures["step_time_s"], figures["peak_memory_bytes"]


def found(memory_bytes: int = 0) -> Plan:
    return searched(PLAN, Judge(cluster(memory_bytes), MEMORY, layers, transfers, schedule_of), 4.0).plan


def layers(plan: Plan) -> ModelProfile:
    return PROFILE


def transfers(plan: Plan) -> list[Transfer]:
    return plan_transfers(plan, PROFILE, portals=True)


def schedule_of(plan: Plan) -> Schedule:
    return plan_order.schedule(plan, transfers(plan))


def test_the_chain_takes_what_the_simulator_says() -> None:
    """The optimizer's steps come on top, at the end."""
    chain = chain_of(PLAN, PROFILE, cluster(), MEMORY, transfers(PLAN))
    for name, orders in families(chain).items():
        schedule = FAMILIES[name].build(6, 3, 1, transfers(PLAN))
        step_s = simulate(schedule, PLAN, PROFILE, cluster(), MEMORY).figures["step_time_s"]
        assert evaluate(chain, orders).step_s == pytest.approx(step_s, rel=1e-6)


def test_the_first_device_has_the_inputs_of_all_micro_batches() -> None:
    one, all_ = (chain_of(plan, PROFILE, cluster(10**6), MEMORY, transfers(plan)).limits for plan in (ONE, PLAN))
    assert one[0] is not None and all_ == (one[0] - 5 * PROFILE.input_bytes, *one[1:])


def test_no_published_order_is_faster() -> None:
    plan = found()
    step_s, _ = predicted(plan)
    assert step_s <= min(evaluate_family(name) for name in ("1f1b", "zb_h1", "zb_h2", "eager_1f1b", "gpipe")) + 1e-9
    assert plan.predicted["search_bound_s"] <= step_s + 1e-9
    assert plan.predicted["best_family"] in FAMILIES


def evaluate_family(name: str) -> float:
    schedule = FAMILIES[name].build(6, 3, 1, transfers(PLAN))
    step_s: float = simulate(schedule, PLAN, PROFILE, cluster(), MEMORY).figures["step_time_s"]
    return step_s


@pytest.mark.usefixtures("computation")
def test_less_memory_takes_longer_and_is_kept() -> None:
    free_s, peaks = predicted(found())
    limit = round(0.7 * max(peaks))
    step_s, within = predicted(found(limit), limit)
    assert max(within) <= limit
    assert step_s >= free_s


@pytest.mark.parametrize("part", [0.7, 1.0])
def test_no_published_order_that_fits_is_faster(part: float) -> None:
    never_slower(part)


@pytest.mark.parametrize("part", [0.5, 0.6, 0.65, 0.75, 0.8, 0.85, 0.9, 0.95])
def test_at_other_limits(part: float) -> None:
    never_slower(part)


def never_slower(part: float) -> None:
    """At any limit, as the simulator counts memory; and the best of them is named."""
    families_ = {name: by_simulation(name) for name in FAMILIES if FAMILIES[name].places == "one"}
    limit = round(part * max(peak for _, peak in families_.values()))
    fitting = {name: step_s for name, (step_s, peak) in families_.items() if peak <= limit}
    plan = found(limit)
    step_s, peaks = predicted(plan, limit)
    assert max(peaks) <= limit
    assert step_s <= min(fitting.values(), default=step_s) + 1e-9
    if fitting:
        assert plan.predicted["best_family_s"] == pytest.approx(min(fitting.values()))


def by_simulation(name: str) -> tuple[float, int]:
    schedule = FAMILIES[name].build(6, 3, 1, transfers(PLAN))
    figures = simulate(schedule, PLAN, PROFILE, cluster(), MEMORY).figures
    return figures["step_time_s"], max(figures["peak_memory_bytes"])


def test_nothing_fits() -> None:
    with pytest.raises(ProblemError, match="one micro-batch at a time needs"):
        found(9000)


def test_a_plan_keeps_its_order_as_json() -> None:
    plan = found()
    assert Plan.from_json(plan.to_json()) == plan
    assert replace(plan, order=()) != plan


@pytest.mark.parametrize(("weights_s", "limits"), [((4.0, 4.0), (14, 14)), ((2.0, 4.0), (16, 20)), ((4.0, 4.0), ())])
def test_the_bound_holds_for_recomputed_orders_too(weights_s: tuple[float, float], limits: tuple[int, ...]) -> None:
    """Each device keeps one micro-batch, or recomputes two: a search without time finds no such order, and what bounds
    the others is no bound of it. Without limits nothing gains by a recomputation."""
    chain = Chain((0, 1), 2, (2.0, 1.0), (4.0, 4.0), weights_s, (), (12, 8), (1, 1), (1, 1), (1, 1), limits)
    hasty, found = (of_chain(chain, families(chain), seconds, None) for seconds in (0.0, 2.0))
    assert hasty.bound_s <= found.step_s <= hasty.step_s
    assert limits or hasty.bound_s == pytest.approx(found.bound_s)
