from __future__ import annotations

import pytest

from harness.cluster import Cluster
from harness.compose import compose
from harness.interfaces import BatchShape, PlanRequest
from harness.memory import MemoryModel
from harness.mesh import Mesh
from harness.plan import Plan, Stage
from harness.problem import CannotRun, NoPlan
from harness.profile import LayerProfile, ModelProfile
from planners import given


def plan(layers: int, balance: list[int], pipeline: int) -> Plan:
    profile = ModelProfile(tuple(LayerProfile(f"layer_{i}") for i in range(layers)))
    request = PlanRequest(BatchShape(24, 6), pipeline, data=2, recompute="always")
    return given.build(given.Config(balance=balance)).plan(profile, Cluster(), MemoryModel(), request)


def test_stages_are_those_that_are_given() -> None:
    found = plan(11, [2, 6, 3], 3)
    assert found.stages == (Stage(0, 1, 0), Stage(2, 7, 1), Stage(8, 10, 2))
    assert (found.mesh, found.micro_batches, found.recompute) == (Mesh(data=2, pipeline=3), 6, "always")


@pytest.mark.parametrize(
    ("balance", "pipeline", "problem"),
    [
        ([2, 6, 3], 2, ("planner.balance [2,6,3]", "has 3 stages, mesh.pipeline is 2",
                        "mesh.pipeline=3, or as many numbers as stages: 2")),
        ([2, 7, 3], 3, ("planner.balance [2,7,3]", "places 12 layers, the model has 11",
                        "numbers that add up to 11, or planner=balance")),
        ([2, 3], 2, ("planner.balance [2,3]", "places 5 layers, the model has 11",
                     "numbers that add up to 11, or planner=balance")),
    ],
)  # fmt: skip
def test_a_balance_that_does_not_fit_is_refused_with_both_numbers(
    balance: list[int], pipeline: int, problem: tuple[str, str, str]
) -> None:
    with pytest.raises(NoPlan) as caught:
        plan(11, balance, pipeline)
    found = caught.value.problem
    assert (found.key, found.what, found.mend) == problem


@pytest.mark.parametrize(
    ("balance", "problem"),
    [
        ([], ("planner.balance []", "has 0 stages, needs at least 1", "planner.balance=[34,76,70,61]")),
        ([3, 0, 8], ("planner.balance [3,0,8]", "gives stage 1 0 layers, needs at least 1",
                     "planner.balance=[3,1,8]")),
        ([3, -2], ("planner.balance [3,-2]", "gives stage 1 -2 layers, needs at least 1", "planner.balance=[3,1]")),
    ],
)  # fmt: skip
def test_a_balance_that_fits_no_model_is_refused_when_composed(
    balance: list[int], problem: tuple[str, str, str]
) -> None:
    typed = f"planner.balance=[{','.join(map(str, balance))}]"
    with pytest.raises(CannotRun) as caught:
        compose(["planner=given", typed, "cluster.devices=3"])
    found = [(p.key, p.what, p.mend) for p in caught.value.problems]
    assert found == [problem]
    with pytest.raises(CannotRun):
        given.build(given.Config(balance=balance))


def test_the_degree_follows_from_the_balance_unless_it_is_given() -> None:
    assert compose(["planner=given", "planner.balance=[34,76,70,61]"]).mesh.pipeline == 4
    assert compose(["planner=given", "planner.balance=[34,76]", "mesh.pipeline=1"]).mesh.pipeline == 1
    assert compose(["planner=uniform"]).mesh.pipeline is None
