"""From an answer to a plan, or to why there is none: what planners of periodic pipelines have in common."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast, get_args

from harness.cluster import Cluster, Duplex
from harness.interfaces import PlanRequest
from harness.memory import MemoryModel
from harness.mesh import Mesh
from harness.plan import Plan
from harness.problem import NoPlan
from harness.profile import ModelProfile
from harness.schedule.demands import faults
from harness.schedule.hops import plan_hops
from harness.schedule.periodic import unrolled
from harness.simulate import simulate
from planners import stages
from planners.periodic.chain import Chain, chain_of
from planners.periodic.timing import Timing

GB = 1e9
AGAIN = 3
DUPLEXES = ("cluster", *get_args(Duplex))
CONTIGUOUS = "each contiguous plan on {} needs a device with {:.3f} GB"
FOUND = "no plan on {} was found for less than {:.3f} GB each"
"""Why no plan exists."""


def to_plan(timing: Timing, request: PlanRequest, predicted: dict[str, Any]) -> Plan:
    """The plan of a timing, however it was found.

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
    return Plan(
        mesh=Mesh(data=request.data, pipeline=request.pipeline, tensor=request.tensor),
        stages=timing.stages,
        micro_batches=request.batch.micro_batches,
        recompute=request.recompute,
        pattern=timing.pattern(),
        predicted={**known, **predicted},
    )


def none_fits(chain: Chain, needed: int, cluster: Cluster, request: PlanRequest, why: str = CONTIGUOUS) -> NoPlan:
    """Why there is no plan (`CONTIGUOUS`, `FOUND`): stages and activations need so much, beside what the chain leaves
    to other things of a device.

    The mend is rounded up to whole MB, so that it works.
    """
    there = cluster.device.memory_bytes
    needed_gb = _whole_mb(needed + there - chain.memory)
    devices = f"{request.pipeline} device" + "s" * (request.pipeline > 1)
    what = f"is too small: {why.format(devices, needed_gb)}"
    return NoPlan(f"cluster.memory_gb {there / GB:g}", what, f"cluster.memory_gb={needed_gb:.3f}")


def requested(profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest, duplex: str) -> Chain:
    """The chain that is asked for. Raises NoPlan for more devices than layers, for a profile without times, and where
    messages would pass each other on links where they cannot."""
    stages.check_request(profile, request)
    links = cluster.link(0, cluster.devices - 1).duplex
    if duplex == "full" and links == "half":
        what = "needs links that are busy in both directions at once, those of the cluster are not"
        raise NoPlan("planner.duplex full", what, "planner.duplex=half, or cluster.duplex=full")
    chosen = links if duplex == "cluster" else cast(Duplex, duplex)
    return chain_of(profile, cluster, memory, chosen, request.batch.micro_batches)


def fitting(
    chain: Chain, made: Callable[[Chain], Plan], profile: ModelProfile, cluster: Cluster, memory: MemoryModel
) -> Plan:
    """The plan that is `made` of the chain; where a simulated step needs more than a device has, one of a chain with so
    much less memory. Messages may wait longer there than in the pattern, since nothing starts later than it can.

    Where the memory model counts as the paper does, messages cost the simulator nothing. Raises NoPlan as `made` does,
    and AssertionError for a plan that is not valid.
    """
    plan = made(chain)
    for _ in range(AGAIN if memory.activations == "saved" else 0):
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
    """Raise AssertionError, with all faults, for a pattern that cannot be repeated: a planner must never make one.

    It is unrolled and looked at; seconds and bytes are counted anew from the profile (`harness.schedule.demands`).
    """
    if found := faults(plan, profile, cluster, memory):
        raise AssertionError("the planner has made a pattern that is not valid:\n" + "\n".join(found))


def _overfull(plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> int:
    """Bytes that the fullest device needs beyond what it has."""
    assert plan.pattern is not None
    devices, hops = [stage.device for stage in plan.stages], plan_hops(plan, profile, portals=False)
    done = simulate(unrolled(plan.pattern, plan.micro_batches, devices, hops), plan, profile, cluster, memory)
    return max(done.figures["peak_memory_bytes"]) - (cluster.device.memory_bytes - memory.reserve_bytes)


def alike(cluster: Cluster) -> bool:
    """Whether all links are alike, as planners take them to be: the slowest of a cluster."""
    return cluster.link(0, cluster.devices - 1) == cluster.link(0, min(1, cluster.devices - 1))


def wrong_duplex(duplex: str) -> list[str]:
    """A line for `planner.duplex`, if it is none of `DUPLEXES`."""
    if duplex in DUPLEXES:
        return []
    return [f"planner.duplex {duplex}   is none of {', '.join(DUPLEXES)}   -> planner.duplex={DUPLEXES[0]}"]


def _whole_mb(size: int) -> float:
    return math.ceil(size / 1e6) / 1e3
