from __future__ import annotations

from pathlib import Path

import pytest

from harness.cli.compose import compose
from harness.config.overrides import quoted
from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.plan import Mesh, Plan, Stage
from harness.core.problem import CannotRun, NoPlan
from harness.interfaces import BatchShape, PlanRequest
from harness.planning import prepare
from harness.report.progress import Progress
from planners import given
from tests.problems import Row, row, rows


def plan(layers: int, balance: list[int], pipeline: int) -> Plan:
    profile = ModelProfile(tuple(LayerProfile(f"layer_{i}") for i in range(layers)))
    request = PlanRequest(BatchShape(24, 6), pipeline, data=2, recompute="always")
    return given.build(given.Config(balance=balance)).plan(profile, Cluster(), MemoryModel(), request)


def test_stages_are_those_that_are_given() -> None:
    found = plan(11, [2, 6, 3], 3)
    assert found.stages == (Stage(0, 1, 0), Stage(2, 7, 1), Stage(8, 10, 2))
    assert (found.mesh, found.micro_batches, found.recompute) == (Mesh(data=2, pipeline=3), 6, "always")


@pytest.mark.parametrize(
    ("balance", "pipeline", "numbers", "fixes"),
    [
        ([2, 6, 3], 2, (3, 2), []),
        ([2, 7, 3], 3, (12, 11), ["planner=balance"]),
        ([1] * 12, 12, (12, 11), ["planner=balance"]),
        ([2, 3], 2, (5, 11), ["planner=balance"]),
    ],
)
def test_a_balance_that_does_not_fit_is_refused_with_both_numbers(
    balance: list[int], pipeline: int, numbers: tuple[int, int], fixes: list[str]
) -> None:
    with pytest.raises(NoPlan) as caught:
        plan(11, balance, pipeline)
    found = caught.value.problem
    assert row(found) == ("planner.balance", balance, fixes)
    assert {str(number) for number in numbers} <= set(found.message.split()) and str(numbers[1]) in found.hint


@pytest.mark.parametrize(
    ("balance", "fixes"),
    [
        ([], []),
        ([0, 0], []),
        ([241, 0], ["planner.balance=[241]"]),
        ([3, 0, 8], ["planner.balance=[3,8]"]),
        ([3, -2], ["planner.balance=[3]"]),
    ],
)
def test_a_balance_that_fits_no_model_is_refused_when_composed(balance: list[int], fixes: list[str]) -> None:
    typed = f"planner.balance=[{','.join(map(str, balance))}]"
    with pytest.raises(CannotRun) as caught:
        compose(["planner=given", typed, "cluster.devices=3"])
    assert rows(caught.value.problems) == [("planner.balance", balance, fixes)]
    assert caught.value.problems[0].hint == ("" if fixes else given.EXAMPLE)
    with pytest.raises(CannotRun):
        given.build(given.Config(balance=balance))


def test_the_degree_follows_from_the_balance_unless_it_is_given() -> None:
    assert compose(["planner=given", "planner.balance=[34,76,70,61]"]).mesh.pipeline == 4
    assert compose(["planner=given", "planner.balance=[34,76]", "mesh.pipeline=2"]).mesh.pipeline == 2
    assert compose(["planner=uniform"]).mesh.pipeline is None


def refused(*overrides: str) -> list[Row]:
    with pytest.raises(CannotRun) as caught:
        compose(["planner=given", *overrides])
    return rows(caught.value.problems)


@pytest.mark.parametrize("typed", [1, 16])
def test_another_degree_than_that_of_the_balance_is_reported_once(typed: int) -> None:
    problem = ("mesh.pipeline", typed, ["without mesh.pipeline"])
    assert refused("planner.balance=[34,76]", f"mesh.pipeline={typed}", "cluster.devices=2") == [problem]


def test_an_engine_without_stages_takes_a_balance_of_one() -> None:
    problem = ("planner.balance", [120, 121], ["engine=gpipe", "planner.balance=[241]"])
    assert refused("engine=single", "planner.balance=[120,121]") == [problem]
    assert compose(["planner=given", "engine=single", "planner.balance=[241]"]).mesh.pipeline == 1
    assert compose(["planner=given", "engine=single", "planner.balance=[1,2]", "mode=profile"]).mode == "profile"


def test_a_degree_of_null_leaves_the_stages_open() -> None:
    problem = ("mesh.pipeline", None, ["without mesh.pipeline"])
    assert refused("planner.balance=[34,76]", "mesh.pipeline=null") == [problem]


@pytest.mark.parametrize("typed", [[], ["mesh.pipeline=5"]])
def test_more_stages_than_devices_are_reported_once_by_the_whole_run(tmp_path: Path, typed: list[str]) -> None:
    ModelProfile((LayerProfile("layer", forward_s=1, backward_s=1),) * 10, model="unet", micro_batch=2).save(
        tmp_path / "p.json"
    )
    overrides = ["planner=given", "planner.balance=[2,2,2,2,2]", "mode=plan", "cluster=flat", "cluster.devices=4"]
    overrides += [quoted("profile", str(tmp_path / "p.json")), "batch.micro_batches=4", "batch.size=8", *typed]
    with pytest.raises(CannotRun) as caught:
        prepare.prepare(compose(overrides), overrides, tmp_path, Progress())
    assert rows(caught.value.problems) == [("planner.balance", [2] * 5, ["cluster.devices=5"])]
