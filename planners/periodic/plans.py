"""From an answer to a plan, or to why there is none: what planners of periodic pipelines have in common."""

from __future__ import annotations

import math
from typing import Any, get_args

from harness.cluster import Cluster
from harness.interfaces import PlanRequest
from harness.memory import MemoryModel
from harness.mesh import Mesh
from harness.plan import Plan
from harness.problem import NoPlan
from harness.schedule.validity import faults_of
from planners.periodic.chain import Duplex
from planners.periodic.timing import Timing

GB = 1e9


def to_plan(timing: Timing, request: PlanRequest, predicted: dict[str, Any]) -> Plan:
    """The plan of a timing, unrolled and looked at (`harness.schedule.validity`), however it was found.

    What is `predicted` there comes behind what is known of every timing:

    `period_s`, `activations` (stored micro-batches of each stage), `pattern_memory_bytes` (of each device at its
    fullest moment, 0 for one without a stage) and `memory_limit_bytes`; what a pattern is checked and drawn with:
    `stored_bytes` (of a micro-batch, by stage), `fixed_bytes` (by device), `tasks_s` (by op); `one_device_s`, all work
    of a micro-batch.
    """
    held, fixed = timing.memory(), timing.fixed()
    known = {
        "period_s": timing.period_s,
        "activations": list(timing.activations()),
        "pattern_memory_bytes": [held.get(device, 0) for device in range(request.pipeline)],
        "memory_limit_bytes": timing.chain.memory,
        "stored_bytes": list(timing.stored()),
        "fixed_bytes": [fixed.get(device, 0) for device in range(request.pipeline)],
        "tasks_s": timing.tasks_s(),
        "one_device_s": timing.chain.seconds(timing.chain.loads[-1]),
    }
    plan = Plan(
        mesh=Mesh(data=request.data, pipeline=request.pipeline, tensor=request.tensor),
        stages=timing.stages,
        micro_batches=request.batch.micro_batches,
        recompute=request.recompute,
        pattern=timing.pattern(),
        predicted={**known, **predicted},
    )
    _check(plan, timing)
    return plan


def _check(plan: Plan, timing: Timing) -> None:
    """Raise AssertionError, with all faults, for a pattern that cannot be repeated: a planner must never make one."""
    assert plan.pattern is not None
    chain = timing.chain
    found = faults_of(
        plan.pattern, timing.tasks_s(), timing.stored(), timing.fixed(), limits=chain.memory, duplex=chain.duplex
    )
    if found:
        raise AssertionError("the planner has made a pattern that is not valid:\n" + "\n".join(found))


def too_small(plans: str, needed_bytes: int, cluster: Cluster, memory: MemoryModel, request: PlanRequest) -> NoPlan:
    """Why none of these `plans` ("contiguous") exists: a device needs `needed_bytes` beside the memory model's reserve.

    The mend is rounded up to whole MB, so that it works.
    """
    needed_gb, there_gb = (_whole_mb(needed_bytes + memory.reserve_bytes), cluster.device.memory_bytes / GB)
    devices = f"{request.pipeline} device" + "s" * (request.pipeline > 1)
    what = f"is too small: each {plans} plan on {devices} needs a device with {needed_gb:.3f} GB"
    return NoPlan(f"cluster.memory_gb {there_gb:g}", what, f"cluster.memory_gb={needed_gb:.3f}")


def wrong_duplex(duplex: str) -> list[str]:
    """A line for `planner.duplex`, if it is neither half nor full."""
    known = get_args(Duplex)
    if duplex in known:
        return []
    return [f"planner.duplex {duplex}   is none of {', '.join(known)}   -> planner.duplex={known[0]}"]


def _whole_mb(size: int) -> float:
    return math.ceil(size / 1e6) / 1e3
