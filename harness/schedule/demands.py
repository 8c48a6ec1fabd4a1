"""What a plan's pattern is checked against, from profile, cluster and memory model alone: nothing of its planner's.

layers, links, memory model  ->  seconds and bytes of each op, stage, device  ->  harness.schedule.validity
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.cluster import Cluster
from harness.memory import MemoryModel
from harness.op import Op
from harness.plan import Plan
from harness.profile import ModelProfile
from harness.schedule.validity import faults_of
from harness.simulate.ledger import working_bytes

BUFFERS = 2
"""Of what crosses a cut, on each of its devices: one in use, one that fills (MadPipe, section 4.1)."""


@dataclass(frozen=True)
class Demands:
    """`seconds` of every op of a micro-batch, by its notation with micro-batch 0: a pattern with fewer has left some
    out. `stored` bytes of a micro-batch by stage, `fixed` bytes by device, `limit` bytes of each device."""

    seconds: dict[str, float]
    stored: list[int]
    fixed: dict[int, int]
    limit: int


def demands(plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> Demands:
    """Of the stages of a plan. What crosses a cut between two devices, skips included, is one message each way.

    Where the memory model counts all that is saved, the inputs of all micro-batches, the output, and what a backward
    task works with are there all the time.
    """
    seconds: dict[str, float] = {}
    for j, stage in enumerate(plan.stages):
        seconds[str(Op(j, "F", 0))] = profile.sum("forward_s", stage.first, stage.last)
        seconds[str(Op(j, "B", 0))] = profile.sum("backward_s", stage.first, stage.last)
    for j, size in _cuts(plan, profile).items():
        message_s = cluster.link(plan.stages[j - 1].device, plan.stages[j].device).seconds(size)
        seconds |= {str(Op(j, "copy", 0, "", j - 1)): message_s, str(Op(j - 1, "copy", 0, "", j)): message_s}
    return Demands(
        seconds,
        [memory.task_bytes(profile, stage.first, stage.last) for stage in plan.stages],
        {device: _fixed(device, plan, profile, memory) for device in plan.devices},
        cluster.device.memory_bytes - memory.reserve_bytes,
    )


def faults(plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> list[str]:
    """A line for each fault of the plan's pattern (`validity.faults_of`); none for a plan without one."""
    if plan.pattern is None:
        return []
    asked = demands(plan, profile, cluster, memory)
    duplex = cluster.link(0, cluster.devices - 1).duplex
    return faults_of(plan.pattern, asked.seconds, asked.stored, asked.fixed, asked.limit, duplex)


def _cuts(plan: Plan, profile: ModelProfile) -> dict[int, int]:
    """By the stage behind it, the bytes that cross each cut between two devices."""
    behind = range(1, len(plan.stages))
    ends = [stage.device for stage in plan.stages]
    return {j: profile.crossing_bytes(plan.stages[j].first) for j in behind if ends[j - 1] != ends[j]}


def _fixed(device: int, plan: Plan, profile: ModelProfile, memory: MemoryModel) -> int:
    """What tied layers share counts once on a device."""
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
