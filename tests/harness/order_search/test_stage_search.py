"""The search of stages and their order: against all stages, within the memory, within what the model allows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from harness.core.cluster import Cluster, Device, Link
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile, Skip
from harness.core.plan import Plan
from harness.core.problem import Problem, ProblemError
from harness.order_search.plan_chain import Judge, Ordered, searched
from harness.order_search.stage_search import neighbors, searched_stages
from harness.schedule import Schedule, plan_order
from harness.schedule.transfers import Transfer, plan_transfers
from planners.block_partition import even

SECONDS = 0.5
CASES = {1: 0.8, 7: 0, 14: 0.6, 17: 0, 23: 0, 24: 0.6, 28: 0.6, 33: 0.8, 38: 0}
"""Models by seed, with the memory of a device as a part of what the stages of `drawn` take without a limit; 0: none."""


def drawn(seed: int, stages: tuple[int, ...] = (2, 3), most: int = 8) -> tuple[ModelProfile, Plan]:
    """Return a random model of uneven layers, and a plan with as many in each stage."""
    draw = random.Random(seed)
    n, m = draw.choice(stages), draw.choice((3, 4))
    layers = tuple(
        LayerProfile(
            f"layer{k}",
            0.001 * draw.randint(1, 9),
            0.001 * draw.randint(2, 18),
            param_bytes=100 * draw.randint(1, 9),
            output_bytes=1000 * draw.randint(1, 4),
            saved_bytes=1000 * draw.randint(2, 10),
        )
        for k in range(draw.randint(2 * n, most))
    )
    skips = (Skip(0, len(layers) - 1, 2000, "up"),) if draw.random() < 0.4 else ()
    return ModelProfile(layers, input_bytes=1000, skips=skips), Plan.contiguous(even(len(layers), n), m)


def judge_of(profile: ModelProfile, stages: int, memory_bytes: int = 0) -> Judge:
    """Return how `engine=pipeline` judges plans; without a number memory has no limit."""
    cluster = Cluster(devices_per_node=stages, device=Device("D", memory_bytes), intra=Link(1e-4, 1e-7))

    def transfers(plan: Plan) -> list[Transfer]:
        return plan_transfers(plan, profile, portals=True)

    def schedule(plan: Plan) -> Schedule:
        return plan_order.schedule(plan, transfers(plan))

    def layers(plan: Plan) -> ModelProfile:
        return profile.without_input_gradients(plan.stages[0].last)

    return Judge(cluster, MemoryModel(messages="posted"), layers, transfers, schedule)


def allowed(plan: Plan) -> list[Problem]:
    return []


def balances(layers: int, stages: int) -> Iterator[list[int]]:
    for cuts in combinations(range(1, layers), stages - 1):
        yield [end - start for start, end in pairwise((0, *cuts, layers))]


def best_of_all(plan: Plan, judge: Judge) -> float:
    """The least step time of all stages, each with the order that the search finds."""
    found = [float("inf")]
    for balance in balances(sum(plan.balance), len(plan.stages)):
        try:
            found.append(searched(Plan.contiguous(balance, plan.micro_batches), judge, SECONDS).step_s)
        except ProblemError:
            continue
    return min(found)


def check(found: Ordered, plan: Plan, judge: Judge) -> None:
    """All layers are in stages on the same devices, the step takes what is promised, and is not slower than before."""
    assert sum(found.plan.balance) == sum(plan.balance)
    assert [one.device for one in found.plan.stages] == [one.device for one in plan.stages]
    again = judge.simulated(replace(found.plan, order=(), recompute="never"), found.orders)
    assert again.plan.order == found.plan.order
    assert (again.step_s, again.peak_bytes, again.missing_bytes) == (found.step_s, found.peak_bytes, 0)
    assert found.plan.predicted["planner_balance"] == list(plan.balance)
    assert found.step_s <= found.plan.predicted.get("planner_step_s", float("inf"))
    assert Plan.from_json(found.plan.to_json()) == found.plan


@pytest.mark.parametrize("seed", [6, 14, 21, 22, 33])
def test_no_other_stages_are_faster(seed: int) -> None:
    profile, plan = drawn(seed)
    judge = judge_of(profile, len(plan.stages))
    found = searched_stages(plan, judge, allowed, SECONDS)
    check(found, plan, judge)
    assert found.step_s <= searched(plan, judge, SECONDS).step_s
    assert found.step_s == pytest.approx(best_of_all(plan, judge))


def test_few_other_stages_are_faster(computation: None) -> None:
    """Models of two and three stages, some with less memory than the fastest order of their stages takes."""
    gaps = []
    for seed, part in CASES.items():
        profile, plan = drawn(seed)
        free = judge_of(profile, len(plan.stages))
        judge = judge_of(profile, len(plan.stages), round(part * searched(plan, free, SECONDS).peak_bytes))
        found = searched_stages(plan, judge, allowed, SECONDS)
        check(found, plan, judge)
        assert not part or found.peak_bytes <= judge.cluster.device.memory_bytes
        gaps.append(found.step_s / best_of_all(plan, judge) - 1)
    assert sum(gap < 1e-6 for gap in gaps) >= 0.8 * len(gaps)
    assert max(gaps) < 0.05


def test_stages_that_do_not_fit_are_left() -> None:
    """Two layers with large activations are more than a device has; one of them is not."""
    plan, judge = large_and_small()
    with pytest.raises(ProblemError):
        searched(plan, judge, SECONDS)
    found = searched_stages(plan, judge, allowed, SECONDS)
    check(found, plan, judge)
    assert found.plan.balance == (1, 3)
    assert found.peak_bytes <= judge.cluster.device.memory_bytes
    assert "planner_step_s" not in found.plan.predicted


def test_nothing_fits() -> None:
    plan, judge = large_and_small(limit=9_000)
    with pytest.raises(ProblemError, match="one micro-batch at a time needs"):
        searched_stages(plan, judge, allowed, SECONDS)


def large_and_small(limit: int = 18_000) -> tuple[Plan, Judge]:
    sizes = (10_000, 10_000, 10, 10)
    layers = tuple(LayerProfile(f"layer{k}", 0.01, 0.02, 10, 10, saved_bytes=size) for k, size in enumerate(sizes))
    profile = ModelProfile(layers, input_bytes=10)
    return Plan.contiguous([2, 2], 3), judge_of(profile, 2, limit)


def test_nothing_is_recomputed_where_the_model_cannot() -> None:
    """A layer that draws random numbers of Python gets others in a recomputation."""
    profile, plan = drawn(10)
    judge = judge_of(profile, 2, round(0.6 * searched(plan, judge_of(profile, 2), SECONDS).peak_bytes))
    assert recomputes(searched_stages(plan, judge, allowed, SECONDS))
    never = replace(judge, recomputes=False)
    assert not recomputes(searched_stages(plan, never, allowed, SECONDS))
    assert not recomputes(searched(plan, never, SECONDS))


def recomputes(found: Ordered) -> bool:
    return any(kind == "R" for row in found.orders for kind, _, _ in row)


def test_layers_that_must_be_in_one_stage_stay_there() -> None:
    """Without that the fastest stages of seed 33 have 2 and 4 layers."""
    profile, plan = drawn(33)
    judge, asked = judge_of(profile, 2), []

    def refused(one: Plan) -> list[Problem]:
        asked.append(one.balance)
        return [Problem("model", None, "needs both")] * (one.stage_of(1) != one.stage_of(2))

    assert searched_stages(plan, judge, allowed, SECONDS).plan.balance == (2, 4)
    found = searched_stages(plan, judge, refused, SECONDS)
    check(found, plan, judge)
    assert found.plan.balance != (2, 4) and (2, 4) in asked


def test_what_the_planner_says_of_its_stages_is_dropped_where_they_change() -> None:
    for seed, moved in ((33, True), (22, False)):
        profile, plan = drawn(seed)
        plan = replace(plan, predicted={"stage_cost": [1.0, 2.0]})
        found = searched_stages(plan, judge_of(profile, 2), allowed, SECONDS).plan
        assert (found.balance != plan.balance) is moved
        assert ("stage_cost" in found.predicted) is not moved


def test_when_time_is_up_the_order_of_the_planners_stages_is_there() -> None:
    profile, plan = drawn(33)
    judge = judge_of(profile, 2)
    found = searched_stages(plan, judge, allowed, SECONDS, in_all=0.0)
    assert found.plan.stages == plan.stages
    assert found.step_s == searched(plan, judge, SECONDS).step_s


def test_a_stage_on_the_way_keeps_its_number_of_layers() -> None:
    assert set(neighbors((3, 2))) == {(2, 3), (1, 4), (4, 1)}
    assert set(neighbors((1, 2, 2))) == {(2, 1, 2), (2, 2, 1), (1, 1, 3), (1, 3, 1)}
