"""Shared base of the planners of consecutive stages: checks of the request, and the plan of stage sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from harness.core.model_profile import ModelProfile
from harness.core.plan import Mesh, Plan
from harness.core.problem import NoPlan, Problem
from harness.interfaces import PlanRequest


def check_request(profile: ModelProfile, request: PlanRequest) -> None:
    """Raises NoPlan where the layers cannot be divided into the requested stages."""
    layers, pipeline, micro_batches = len(profile.layers), request.pipeline, request.batch.micro_batches
    if pipeline < 1:
        raise NoPlan(Problem("mesh.pipeline", pipeline, "must be at least 1", ({"mesh.pipeline": 1},)))
    stages = len(request.devices)
    if stages > layers:
        each = f", {stages // pipeline} stages on each device" if stages > pipeline else ""
        message = f"needs at least {stages} layers{each}, the model has {layers}"
        fewer = layers * pipeline // stages
        fixes = ({"mesh.pipeline": fewer},) if fewer else ()  # else the stages of one device are too many
        raise NoPlan(Problem("mesh.pipeline", pipeline, message, fixes, "" if fewer else "a larger model"))
    if micro_batches < 1:
        fix = {"batch.micro_batches": 1}
        raise NoPlan(Problem("batch.micro_batches", micro_batches, "must be at least 1", (fix,)))


def to_plan(sizes: Sequence[int], request: PlanRequest, predicted: dict[str, Any]) -> Plan:
    """Returns a plan whose stage j holds `sizes[j]` layers, on the device of the request."""
    mesh = Mesh(data=request.data, pipeline=request.pipeline, tensor=request.tensor)
    plan = Plan.contiguous(list(sizes), request.batch.micro_batches, request.recompute)
    stages = tuple(replace(stage, device=request.devices[j]) for j, stage in enumerate(plan.stages))
    return replace(plan, mesh=mesh, stages=stages, predicted=predicted)
