"""Checks of a finished plan: its layers, its mesh, its devices, and the memory of each device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from omegaconf import DictConfig

from harness.checks.mesh import given_balance
from harness.checks.request import too_many_devices
from harness.config.overrides import given
from harness.core import units
from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Mesh, Plan
from harness.core.problem import Problem

MEMORY = "cluster.memory_gb"
"""The key of every problem with the memory of a device."""


def check_plan(config: DictConfig, plan: Plan, mesh: Mesh, layers: int, cluster: Cluster) -> list[Problem]:
    """Check a planner's result: every layer is in a stage, every stage on an existing device, and the mesh is the
    requested one."""
    wrong = []
    if plan.stages[-1].last + 1 != layers:
        wrong.append(f"placed {plan.stages[-1].last + 1} layers, the model has {layers}")
    if plan.mesh != mesh:
        wrong.append(f"planned for {plan.mesh}, asked for {mesh}")
    devices_missing = []
    if max(plan.devices) >= cluster.devices:
        devices_missing = too_many_devices(config, mesh, cluster) if given_balance(config) else []
        if not devices_missing:
            wrong.append(f"placed a stage on device {max(plan.devices)}, the last one is {cluster.devices - 1}")
    name = config.planner.name
    return [*(Problem("planner", name, message, ({"planner": "balance"},)) for message in wrong), *devices_missing]


def idle(plan: Plan) -> list[Problem]:
    """A note on a plan that has no stage on some devices of its mesh."""
    wanted, used = plan.mesh.pipeline, plan.used.pipeline
    if used == wanted:
        return []
    left = f"{wanted - used} stay idle" if wanted - used > 1 else "1 stays idle"
    message = (
        f"has more devices than the plan needs: its stages are on {used}, {left}; figures of each device are of {used}"
    )
    return [Problem("mesh.pipeline", wanted, message, ({"mesh.pipeline": used},))]


def frozen(plan: Plan, profile: ModelProfile) -> list[Problem]:
    """A note on layers that no gradient reaches, since all that come before them are frozen, too."""
    count = profile.frozen_prefix
    if not count:
        return []
    layers = f"its first {count} layers are frozen and have" if count > 1 else "its first layer is frozen and has"
    whole = [str(number) for number, stage in enumerate(plan.stages) if stage.last < count]
    stages = f"stage{'s' * (len(whole) > 1)} {' and '.join(whole)}"
    more = f": that of {stages} is empty" if whole and len(plan.stages) > 1 else ""
    return [Problem("model", profile.model, f"{layers} no backward pass{more}")]


def check_memory(plan: Plan, peak_bytes: Sequence[int], cluster: Cluster, memory: MemoryModel) -> list[Problem]:
    """One problem for all devices whose predicted peak is more than they have; `peak_bytes` in the order of
    `plan.devices`."""
    there = memory.available_bytes(cluster.device.memory_bytes)
    full = {device: peak for device, peak in zip(plan.devices, peak_bytes, strict=True) if peak > there}
    if not full:
        return []
    stages = [number for number, stage in enumerate(plan.stages) if stage.device in full]
    most = max(full.values())
    needed, available = units.sizes(most, there)
    message = f"{_stages(stages, len(full))} {needed}, a device has {available}"
    return [too_little_memory(message, most, there)]


def too_little_memory(message: str, needed: float | None = None, available: float | None = None) -> Problem:
    """A problem with the memory of the cluster's devices, in bytes."""
    numbers = {"needed_bytes": needed, "available_bytes": available}
    return Problem(MEMORY, None, message, numbers={key: count for key, count in numbers.items() if count is not None})


def with_value(problems: Sequence[Problem], config: DictConfig, overrides: Sequence[str]) -> list[Problem]:
    """The problems; those with the memory of the devices with its value, if the user has typed it."""
    typed = config.cluster.memory_gb if given(overrides, MEMORY) else None
    return [replace(problem, value=typed) if problem.key == MEMORY else problem for problem in problems]


def _stages(stages: Sequence[int], devices: int) -> str:
    """Return the subject of the message: "stage 1 needs", "stages 0, 2 on one device need", "stages 0 to 3, 5 need up
    to"."""
    if len(stages) == 1:
        return f"stage {stages[0]} needs"
    rows: list[list[int]] = []
    for stage in stages:
        if rows and rows[-1][-1] == stage - 1:
            rows[-1].append(stage)
        else:
            rows.append([stage])
    texts = [f"{row[0]} to {row[-1]}" if len(row) > 2 else ", ".join(map(str, row)) for row in rows]
    return f"stages {', '.join(texts)} {'on one device need' if devices == 1 else 'need up to'}"
