"""What every planner of consecutive stages needs: a look at the request before, the plan after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from harness.interfaces import PlanRequest
from harness.mesh import Mesh
from harness.plan import Plan
from harness.problem import NoPlan
from harness.profile import ModelProfile


def check_request(profile: ModelProfile, request: PlanRequest) -> None:
    """Raise NoPlan where no cut of the layers into `request.pipeline` stages exists."""
    layers, stages, micro_batches = len(profile.layers), request.pipeline, request.batch.micro_batches
    if stages < 1:
        raise NoPlan(f"mesh.pipeline {stages}", "must be at least 1", "mesh.pipeline=1")
    if stages > layers:
        what = f"needs at least {stages} layers, the model has {layers}"
        raise NoPlan(f"mesh.pipeline {stages}", what, f"mesh.pipeline={layers}")
    if micro_batches < 1:
        raise NoPlan(f"batch.micro_batches {micro_batches}", "must be at least 1", "batch.micro_batches=1")


def to_plan(sizes: Sequence[int], request: PlanRequest, predicted: dict[str, Any]) -> Plan:
    """Stage j holds `sizes[j]` layers and runs on device j."""
    mesh = Mesh(data=request.data, pipeline=request.pipeline, tensor=request.tensor)
    plan = Plan.contiguous(list(sizes), request.batch.micro_batches, request.recompute)
    return replace(plan, mesh=mesh, predicted=predicted)
