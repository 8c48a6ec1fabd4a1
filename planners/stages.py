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
    """Raise NoPlan where no cut of the layers into the stages that are asked for exists."""
    layers, pipeline, micro_batches = len(profile.layers), request.pipeline, request.batch.micro_batches
    if pipeline < 1:
        raise NoPlan(f"mesh.pipeline {pipeline}", "must be at least 1", "mesh.pipeline=1")
    stages = len(request.devices)
    if stages > layers:
        each = f", {stages // pipeline} stages on each device" if stages > pipeline else ""
        what = f"needs at least {stages} layers{each}, the model has {layers}"
        raise NoPlan(f"mesh.pipeline {pipeline}", what, f"mesh.pipeline={max(1, layers * pipeline // stages)}")
    if micro_batches < 1:
        raise NoPlan(f"batch.micro_batches {micro_batches}", "must be at least 1", "batch.micro_batches=1")


def to_plan(sizes: Sequence[int], request: PlanRequest, predicted: dict[str, Any]) -> Plan:
    """Stage j holds `sizes[j]` layers, on the device that the request has for it."""
    mesh = Mesh(data=request.data, pipeline=request.pipeline, tensor=request.tensor)
    plan = Plan.contiguous(list(sizes), request.batch.micro_batches, request.recompute)
    stages = tuple(replace(stage, device=request.devices[j]) for j, stage in enumerate(plan.stages))
    return replace(plan, mesh=mesh, stages=stages, predicted=predicted)
