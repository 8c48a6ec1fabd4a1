from __future__ import annotations

from pathlib import Path

import pytest

from harness import preparation
from harness.cluster import Cluster
from harness.compose import compose
from harness.interfaces import BatchShape, PlanRequest
from harness.memory import MemoryModel
from harness.mesh import Mesh
from harness.overrides import quoted
from harness.plan import Plan, Stage
from harness.problem import CannotRun, NoPlan
from harness.profile import LayerProfile, ModelProfile
from harness.progress import Progress
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
        ([2, 6, 3], 2, ("planner.balance [2,6,3]", "has 3 stages, the engine has 2 on mesh.pipeline 2",
                        "as many numbers as stages: 2")),
        ([2, 7, 3], 3, ("planner.balance [2,7,3]", "places 12 layers, the model has 11",
                        "numbers that add up to 11, or planner=balance")),
        ([1] * 12, 12, ("planner.balance [1,1,1,1,1,1,1,1,1,1,1,1]", "places 12 layers, the model has 11",
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
        ([], ("planner.balance []", "has 0 stages, needs at least 1", given.EXAMPLE)),
        ([0, 0], ("planner.balance [0,0]", "gives stage 0 0 layers, needs at least 1", given.EXAMPLE)),
        ([241, 0], ("planner.balance [241,0]", "gives stage 1 0 layers, needs at least 1", "planner.balance=[241]")),
        ([3, 0, 8], ("planner.balance [3,0,8]", "gives stage 1 0 layers, needs at least 1", "planner.balance=[3,8]")),
        ([3, -2], ("planner.balance [3,-2]", "gives stage 1 -2 layers, needs at least 1", "planner.balance=[3]")),
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
    assert compose(["planner=given", "planner.balance=[34,76]", "mesh.pipeline=2"]).mesh.pipeline == 2
    assert compose(["planner=uniform"]).mesh.pipeline is None


def refused(*overrides: str) -> list[tuple[str, str, str]]:
    with pytest.raises(CannotRun) as caught:
        compose(["planner=given", *overrides])
    return [(p.key, p.what, p.mend) for p in caught.value.problems]


@pytest.mark.parametrize("typed", [1, 16])
def test_another_degree_than_that_of_the_balance_is_told_once(typed: int) -> None:
    mend = f"leave mesh.pipeline out, or as many numbers in planner.balance: {typed}"
    problem = (f"mesh.pipeline {typed}", "planner.balance [34,76] has 2 stages", mend)
    assert refused("planner.balance=[34,76]", f"mesh.pipeline={typed}", "cluster.devices=2") == [problem]


def test_an_engine_without_stages_takes_a_balance_of_one() -> None:
    mend = "engine=gpipe, or planner.balance=[241]"
    problem = ("planner.balance [120,121]", "has 2 stages, engine=single has 1", mend)
    assert refused("engine=single", "planner.balance=[120,121]") == [problem]
    assert compose(["planner=given", "engine=single", "planner.balance=[241]"]).mesh.pipeline == 1
    assert compose(["planner=given", "engine=single", "planner.balance=[1,2]", "mode=profile"]).mode == "profile"


def test_a_degree_of_null_leaves_the_stages_open() -> None:
    problem = ("mesh.pipeline null", "planner.balance [34,76] has 2 stages", "leave mesh.pipeline out")
    assert refused("planner.balance=[34,76]", "mesh.pipeline=null") == [problem]


@pytest.mark.parametrize("typed", [[], ["mesh.pipeline=5"]])
def test_more_stages_than_devices_are_told_once_by_the_whole_run(tmp_path: Path, typed: list[str]) -> None:
    ModelProfile((LayerProfile("layer", forward_s=1, backward_s=1),) * 10, model="unet", micro_batch=2).save(
        tmp_path / "p.json"
    )
    overrides = ["planner=given", "planner.balance=[2,2,2,2,2]", "mode=plan", "cluster=flat", "cluster.devices=4"]
    overrides += [quoted("profile", str(tmp_path / "p.json")), "batch.micro_batches=4", "batch.size=8", *typed]
    with pytest.raises(CannotRun) as caught:
        preparation.prepare(compose(overrides), overrides, tmp_path, Progress())
    assert [(p.key, p.what) for p in caught.value.problems] == [
        ("planner.balance [2,2,2,2,2]", "has 5 stages, the cluster has 4 devices")
    ]
