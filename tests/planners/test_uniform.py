from __future__ import annotations

import pytest

from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.plan import Mesh, Plan, Stage
from harness.core.problem import NoPlan
from harness.interfaces import BatchShape, PlanRequest
from planners import uniform
from tests.problems import Row, row


def plan(layers: int, request: PlanRequest) -> Plan:
    profile = ModelProfile(tuple(LayerProfile(f"layer_{i}") for i in range(layers)))
    return uniform.build(uniform.Config()).plan(profile, Cluster(), MemoryModel(), request)


def test_equal_numbers_of_layers_the_first_stages_get_the_remainder() -> None:
    found = plan(11, PlanRequest(BatchShape(24, 6), 4, data=2, recompute="always"))
    assert found.mesh == Mesh(data=2, pipeline=4)
    assert found.stages == (Stage(0, 2, 0), Stage(3, 5, 1), Stage(6, 8, 2), Stage(9, 10, 3))
    assert (found.micro_batches, found.recompute) == (6, "always")


@pytest.mark.parametrize(
    ("stages", "micro_batches", "problem"),
    [
        (16, 4, ("mesh.pipeline", 16, ["mesh.pipeline=5"])),
        (0, 4, ("mesh.pipeline", 0, ["mesh.pipeline=1"])),
        (2, 0, ("batch.micro_batches", 0, ["batch.micro_batches=1"])),
    ],
)
def test_impossible_requests_are_refused_in_the_users_keys(stages: int, micro_batches: int, problem: Row) -> None:
    with pytest.raises(NoPlan) as caught:
        plan(5, PlanRequest(BatchShape(4, micro_batches), stages))
    assert row(caught.value.problem) == problem
