from __future__ import annotations

import pytest

from harness.cluster import Cluster
from harness.interfaces import BatchShape, PlanRequest
from harness.memory import MemoryModel
from harness.mesh import Mesh
from harness.plan import Plan, Stage
from harness.problem import NoPlan
from harness.profile import LayerProfile, ModelProfile
from planners import uniform


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
        (16, 4, ("mesh.pipeline 16", "needs at least 16 layers, the model has 5", "mesh.pipeline=5")),
        (0, 4, ("mesh.pipeline 0", "must be at least 1", "mesh.pipeline=1")),
        (2, 0, ("batch.micro_batches 0", "must be at least 1", "batch.micro_batches=1")),
    ],
)
def test_impossible_requests_are_refused_in_the_users_keys(
    stages: int, micro_batches: int, problem: tuple[str, str, str]
) -> None:
    with pytest.raises(NoPlan) as caught:
        plan(5, PlanRequest(BatchShape(4, micro_batches), stages))
    found = caught.value.problem
    assert (found.key, found.what, found.mend) == problem
