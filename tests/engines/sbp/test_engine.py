"""Optima that the engine refuses, because blocks of them do not divide: each fix, fed back, is accepted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engines.sbp.engine import Config, build
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.problem import Problem
from harness.interfaces import BatchShape, PlanRequest
from harness.sbp.shortest_path import Ends
from planners.autoddl.planner import Config as AutoDDL
from planners.autoddl.planner import build as autoddl
from planners.data_parallel import Config as DataParallel
from planners.data_parallel import build as data_parallel
from tests.harness.sbp.nets import dense, transformer
from tests.support.sbp_plans import flat

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
def test_every_fix_works(name: str) -> None:
    profile, devices, ends, alpha_s = CASES[name]
    (problem,) = problems(profile, devices, ends, alpha_s)
    assert (problem.key, problem.value) == ("mesh.tensor", devices) and "not divisible by" in problem.message
    assert problem.fixes
    for fix in problem.fixes:
        assert fix and fix.keys() <= {"planner", "batch.size", "mesh.tensor"}
        other = profile.for_samples(fix.get("batch.size", profile.micro_batch))
        assert problems(other, fix.get("mesh.tensor", devices), ends, alpha_s, fix.get("planner", "autoddl")) == [], fix
