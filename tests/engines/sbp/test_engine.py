"""Optima that the engine refuses, because blocks of them do not divide: each mend, fed back, is accepted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engines.sbp.config import Config, build
from harness.interfaces import BatchShape, PlanRequest
from harness.memory import MemoryModel
from harness.problem import Problem
from harness.profile import ModelProfile
from harness.sbp.optimum import Ends
from planners.autoddl.config import Config as AutoDDL
from planners.autoddl.config import build as autoddl
from planners.data_parallel import Config as DataParallel
from planners.data_parallel import build as data_parallel
from tests.engines.sbp.plans import flat
from tests.harness.sbp.nets import dense, transformer

CASES: dict[str, tuple[ModelProfile, int, Ends, float]] = {
    "rows": (dense((24, 12, 48, 96), 24), 18, "free", 1e-4),
    "rows of an odd number": (dense((6, 36, 36, 6, 6), 18), 12, "free", 0.0),
    "columns": (transformer(2, 96, 4, 4, 96, 18), 18, "batch_split", 0.0),
    "columns and rows": (transformer(2, 96, 4, 4, 48, 9), 18, "free", 0.0),
}
"""A profile, devices, ends, and the latency of links."""


def problems(
    profile: ModelProfile, devices: int, ends: Ends, alpha_s: float, planner: str = "autoddl"
) -> list[Problem]:
    """What the engine has against a planner's plan."""
    here = replace(flat(devices, alpha_s), name="local")
    request = PlanRequest(BatchShape(profile.micro_batch, 1), 1, tensor=devices)
    made = autoddl(AutoDDL(ends=ends)) if planner == "autoddl" else data_parallel(DataParallel())
    plan = made.plan(profile, here, MemoryModel(), request)
    return build(Config()).check(plan, profile, here, MemoryModel())


@pytest.mark.parametrize("name", CASES)
def test_every_mend_works(name: str) -> None:
    profile, devices, ends, alpha_s = CASES[name]
    (problem,) = problems(profile, devices, ends, alpha_s)
    assert problem.key == f"mesh.tensor {devices}" and "do not divide by" in problem.what
    for mend in problem.mend.split(", or "):
        keys = dict(key.split("=") for key in mend.split())
        assert keys and keys.keys() <= {"planner", "batch.size", "mesh.tensor"}
        other = profile.of_samples(int(keys.get("batch.size", profile.micro_batch)))
        shards = int(keys.get("mesh.tensor", devices))
        assert problems(other, shards, ends, alpha_s, keys.get("planner", "autoddl")) == [], mend
