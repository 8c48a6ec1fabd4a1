"""Checks of a finished plan: its layers, its mesh, its devices, and the memory of each device."""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import DictConfig

from harness.checks.mesh import stated
from harness.checks.request import too_many_devices
from harness.core import units
from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.plan import Mesh, Plan
from harness.core.problem import Problem

MEMORY = "cluster.memory_gb"
"""The key of every problem with the memory of a device."""
GB = 1e9


def of_plan(config: DictConfig, plan: Plan, mesh: Mesh, layers: int, cluster: Cluster) -> list[Problem]:
    """What a planner has got wrong: every layer must be in a stage, every stage on a device that there is, and the
    mesh must be the one that was asked for."""
    wrong = []
    if plan.stages[-1].last + 1 != layers:
        wrong.append(f"placed {plan.stages[-1].last + 1} layers, the model has {layers}")
    if plan.mesh != mesh:
        wrong.append(f"planned for {plan.mesh}, asked for {mesh}")
    of_stages = []
    if max(plan.devices) >= cluster.devices:
        of_stages = too_many_devices(config, mesh, cluster) if stated(config) else []
        if not of_stages:
            wrong.append(f"placed a stage on device {max(plan.devices)}, the last one is {cluster.devices - 1}")
    name = config.planner.name
    return [*(Problem("planner", name, message, ({"planner": "balance"},)) for message in wrong), *of_stages]


def of_memory(plan: Plan, peak_bytes: Sequence[int], cluster: Cluster, memory: MemoryModel) -> list[Problem]:
    """Each device whose predicted peak is more than it has; `peak_bytes` in the order of `plan.devices`."""
    there = max(0, cluster.device.memory_bytes - memory.reserve_bytes)
    needs: list[tuple[list[int], str]] = []  # stages, and the memory that each of their devices needs
    for device, needed in zip(plan.devices, peak_bytes, strict=True):
        if needed <= there:
            continue
        owned = [number for number, stage in enumerate(plan.stages) if stage.device == device]
        memory_text = "{} of {}".format(*units.sizes(needed, there))
        if needs and needs[-1][1] == memory_text and len(owned) == 1 and needs[-1][0][-1] == owned[0] - 1:
            needs[-1][0].append(owned[0])
        else:
            needs.append((owned, memory_text))
    return [too_little_memory(cluster, _needs(owned, memory_text, plan)) for owned, memory_text in needs]


def too_little_memory(cluster: Cluster, message: str) -> Problem:
    """A problem with the memory of the cluster's devices."""
    return Problem(MEMORY, float(f"{cluster.device.memory_bytes / GB:.4g}"), message)


def _needs(owned: list[int], memory_text: str, plan: Plan) -> str:
    """The memory of one stage, of the stages of one device, or of neighbours that need the same."""
    if len(owned) == 1:
        return f"stage {owned[0]} needs {memory_text}"
    if plan.stages[owned[0]].device == plan.stages[owned[1]].device:
        return f"stages {', '.join(map(str, owned))} on one device need {memory_text}"
    return f"stages {owned[0]} to {owned[-1]} need {memory_text} each"
