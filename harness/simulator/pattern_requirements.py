"""Requirements of a plan's pattern, from profile, cluster and memory model alone, without the planner's numbers.

layers, links, memory model  ->  seconds and bytes of each op, stage, device  ->  harness.schedule.pattern_validity
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.op import Op
from harness.core.plan import Plan
from harness.core.problem import Problem
from harness.schedule.pattern_validity import pattern_errors
from harness.simulator.memory_timeline import working_bytes

BUFFERS = 2
"""Buffers for each tensor that is sent, on each of its devices: one in use, one being filled (MadPipe, section 4.1)."""


@dataclass(frozen=True)
class PatternRequirements:
    """The limits of a pattern: `seconds` of every op of a micro-batch, by its notation with micro-batch 0.

    A pattern with fewer ops is incomplete. `stored` bytes of a micro-batch by stage, `fixed` bytes by device, `limit`
    bytes of each device."""

    seconds: dict[str, float]
    stored: list[int]
    fixed: dict[int, int]
    limit: int


def pattern_requirements(
    plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel
) -> PatternRequirements:
    """Returns the requirements of a plan's pattern. What crosses a cut between two devices, skips included, is one
    message in each direction.

    Where the memory model counts all that is saved, the inputs of all micro-batches, the output, and what a backward
    task works with are always allocated.
    """
    seconds: dict[str, float] = {}
    for j, stage in enumerate(plan.stages):
        seconds[str(Op(j, "F", 0))] = profile.sum("forward_s", stage.first, stage.last)
        seconds[str(Op(j, "B", 0))] = profile.sum("backward_s", stage.first, stage.last)
    for j, size in _cuts(plan, profile).items():
        message_s = cluster.link(plan.stages[j - 1].device, plan.stages[j].device).seconds(size)
        seconds |= {str(Op(j, "copy", 0, "", j - 1)): message_s, str(Op(j - 1, "copy", 0, "", j)): message_s}
    return PatternRequirements(
        seconds,
        [memory.task_bytes(profile, stage.first, stage.last) for stage in plan.stages],
        {device: _fixed(device, plan, profile, memory) for device in plan.devices},
        memory.available_bytes(cluster.device.memory_bytes),
    )


def plan_pattern_errors(plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> list[Problem]:
    """Checks the plan's pattern (`harness.schedule.pattern_validity.pattern_errors`); a plan without one has no
    problems."""
    if plan.pattern is None:
        return []
    required = pattern_requirements(plan, profile, cluster, memory)
    duplex = cluster.link(0, cluster.devices - 1).duplex
    return pattern_errors(plan.pattern, required.seconds, required.stored, required.fixed, required.limit, duplex)


def _cuts(plan: Plan, profile: ModelProfile) -> dict[int, int]:
    """Maps the stage after each cut between two devices to the bytes that cross it."""
    later = range(1, len(plan.stages))
    ends = [stage.device for stage in plan.stages]
    return {j: profile.crossing_bytes(plan.stages[j].first) for j in later if ends[j - 1] != ends[j]}


def _fixed(device: int, plan: Plan, profile: ModelProfile, memory: MemoryModel) -> int:
    """Returns the bytes that are always allocated on a device; tied weights count once."""
    held = [stage for stage in plan.stages if stage.device == device]
    layers = [number for stage in held for number in range(stage.first, stage.last + 1)]
    size = sum(memory.state_parts(profile, layers).values())
    for j, crossing in _cuts(plan, profile).items():
        size += BUFFERS * crossing * (device in (plan.stages[j - 1].device, plan.stages[j].device))
    if memory.activations == "saved":
        size += max(working_bytes(profile, stage.first, stage.last, min(1.0, memory.gradients)) for stage in held)
        size += plan.micro_batches * profile.input_bytes * (plan.stages[0] in held)
        size += profile.layers[-1].output_bytes * (plan.stages[-1] in held)
    return size
