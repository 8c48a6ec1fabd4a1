"""Converts a timing to a plan, or to the reason why there is none: shared by the planners of periodic pipelines."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast, get_args

from harness.checks.plan_fits import MEMORY, too_little_memory
from harness.core.cluster import Cluster, Duplex
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Mesh, Plan
from harness.core.problem import Fix, NoPlan, Problem, table
from harness.interfaces import PlanRequest
from harness.schedule.builders.periodic import unrolled
from harness.schedule.transfers import plan_transfers
from harness.simulator import simulate
from harness.simulator.pattern_requirements import plan_pattern_errors
from planners import pipeline
from planners.periodic.layer_ticks import Chain, chain_from_profile
from planners.periodic.task_times import Timing

GB = 1e9
ATTEMPTS = 3
MOST_LAYERS = 1000
"""Of a chain: time and memory of the search grow with their square. On two cores 500 layers take 2 s, 1000 take 20 s
and 2000 take 100 s, with planner=contiguous."""
DUPLEXES = ("cluster", *get_args(Duplex))
CONTIGUOUS = "each contiguous plan on {} needs a device with {:.3f} GB"
FOUND = "no plan on {} was found for less than {:.3f} GB each"
"""Why no plan exists."""


def to_plan(timing: Timing, request: PlanRequest, predicted: dict[str, Any]) -> Plan:
    """Returns the plan of a timing.

    The planner's `predicted` follows what is known of every timing:

    `period_s`, `activations` (stored micro-batches of each stage), `pattern_memory_bytes` (the peak of each device,
    0 for one without a stage) and `memory_limit_bytes`; what a pattern is checked and drawn with:
    `stored_bytes` (of a micro-batch, by stage), `fixed_bytes` (by device), `tasks_s` (by op); `one_device_s`, all work
    of a micro-batch.
    """
    held, fixed = timing.memory(), timing.fixed()
    figures = {
        "period_s": timing.period_s,
        "activations": list(timing.activations()),
        "pattern_memory_bytes": [held.get(device, 0) for device in range(request.pipeline)],
        "memory_limit_bytes": timing.chain.memory,
        "stored_bytes": list(timing.stored()),
        "fixed_bytes": [fixed.get(device, 0) for device in range(request.pipeline)],
        "tasks_s": timing.tasks_s(),
        "one_device_s": timing.chain.seconds(timing.chain.loads[-1]),
    }
    return Plan(
        mesh=Mesh(data=request.data, pipeline=request.pipeline, tensor=request.tensor),
        stages=timing.stages,
        micro_batches=request.batch.micro_batches,
        recompute=request.recompute,
        pattern=timing.pattern(),
        predicted={**figures, **predicted},
    )


def memory_error(chain: Chain, needed: int, cluster: Cluster, request: PlanRequest, why: str = CONTIGUOUS) -> NoPlan:
    """Returns why there is no plan (`CONTIGUOUS`, `FOUND`): stages and activations need these bytes, in addition to
    what the chain leaves to other uses of a device.

    The fix is rounded up to whole MB, so that it works.
    """
    needed_gb = _whole_mb(needed + cluster.device.memory_bytes - chain.memory)
    devices = f"{request.pipeline} device" + "s" * (request.pipeline > 1)
    message = why.format(devices, needed_gb)
    return NoPlan(replace(too_little_memory(message), fixes=({MEMORY: needed_gb},)))


def requested_chain(
    profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest, duplex: str, planner: str
) -> Chain:
    """Returns the chain of a request. Raises NoPlan for more devices than layers, for `MOST_LAYERS`, for a profile
    without times, and where messages would pass each other on links where they cannot."""
    pipeline.check_request(profile, request)
    if (layers := len(profile.layers)) > MOST_LAYERS:
        message = f"is for at most {MOST_LAYERS} layers, the model has {layers}: the search grows with their square"
        raise NoPlan(Problem("planner", planner, message, hint="a model of fewer and larger layers"))
    links = cluster.link(0, cluster.devices - 1).duplex
    if duplex == "full" and links == "half":
        message = "needs links that are busy in both directions at once, those of the cluster are not"
        fixes: tuple[Fix, ...] = ({"planner.duplex": "half"}, {"cluster.duplex": "full"})
        raise NoPlan(Problem("planner.duplex", duplex, message, fixes))
    chosen = links if duplex == "cluster" else cast(Duplex, duplex)
    return chain_from_profile(profile, cluster, memory, chosen, request.batch.micro_batches)


def plan_that_fits(
    chain: Chain, made: Callable[[Chain], Plan], profile: ModelProfile, cluster: Cluster, memory: MemoryModel
) -> Plan:
    """Returns the plan that `made` makes of the chain; with less memory if a simulated step needs more than a device
    has.

    In a simulated step messages may wait longer than in the pattern, since ops start as early as they can. Where the
    memory model counts as the paper does, messages cost the simulator nothing. Raises NoPlan as `made` does,
    and AssertionError for a plan that is not valid.
    """
    plan = made(chain)
    for _ in range(ATTEMPTS if memory.activations == "saved" else 0):
        over = _overfull(plan, profile, cluster, memory)
        if over <= 0:
            break
        chain = replace(chain, memory=chain.memory - over)
        try:
            plan = made(chain)
        except NoPlan:
            break
    _check(plan, profile, cluster, memory)
    return plan


def _check(plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> None:
    """Raises AssertionError, with all errors, for a pattern that cannot be repeated: a planner must never make one.

    The pattern is unrolled and checked; seconds and bytes are computed again from the profile
    (`harness.simulator.pattern_requirements`).
    """
    if problems := plan_pattern_errors(plan, profile, cluster, memory):
        raise AssertionError(table(problems, "the pattern that the planner has made"))


def _overfull(plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> int:
    """Returns the bytes that the fullest device needs beyond its memory."""
    assert plan.pattern is not None
    devices, transfers = [stage.device for stage in plan.stages], plan_transfers(plan, profile, portals=False)
    done = simulate(unrolled(plan.pattern, plan.micro_batches, devices, transfers), plan, profile, cluster, memory)
    return max(done.figures["peak_memory_bytes"]) - memory.available_bytes(cluster.device.memory_bytes)


def equal_links(cluster: Cluster) -> bool:
    """Returns whether all links are equal; planners assume the slowest link of a cluster for all."""
    return cluster.link(0, cluster.devices - 1) == cluster.link(0, min(1, cluster.devices - 1))


def _whole_mb(size: int) -> float:
    return math.ceil(size / 1e6) / 1e3
