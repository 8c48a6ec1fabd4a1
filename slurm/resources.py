"""Compute the resources of an array from the points of a sweep: nodes and tasks that are enough for the largest
point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from omegaconf import DictConfig

from harness.checks import mesh
from harness.config import registry
from harness.core.problem import Fix, Problem, refuse
from harness.host import devices
from harness.host.slurm_job import Allocation
from harness.interfaces import Engine
from slurm.partition import Partition
from slurm.settings import TITLE, Settings


@dataclass(frozen=True)
class Need:
    """Devices of a point. `together`: on one node, as one process holds them, or (`forked`) forks a rank for each.
    `all`: it takes what there is. `gpus`: they are GPUs, and not tasks."""

    devices: int
    together: bool = False
    all: bool = False
    gpus: bool = False
    forked: bool = False


@dataclass(frozen=True)
class Shape:
    """Resources of each index of the array."""

    nodes: int
    tasks: int


def need(config: DictConfig, settings: Settings) -> Need:
    """Return the resources that a point's mesh needs. A point that only plans or simulates needs one task."""
    gpus = _on_gpus(config, settings)
    if config.mode != "run":
        return Need(1, gpus=gpus)
    engine: Engine = registry.build("engine", config.engine)
    can = engine.capabilities
    given = [config.mesh[name] for name in mesh.DEGREES if getattr(can, name)]
    stages = len(mesh.given_balance(config))
    free = bool(given) and not any(given) and not stages and not config.cluster.devices
    product = math.prod(degree or 1 for degree in given)
    typed = (config.cluster.devices or 1) * (config.cluster.nodes or 1)
    forked = can.multi_process and config.launch.ranks == "fork"
    return Need(max(product, stages, typed), not can.multi_process or forked, free, gpus, forked)


def _on_gpus(config: DictConfig, settings: Settings) -> bool:
    """Whether a point's devices will be GPUs: if the user says so, or where there are any."""
    kind = config.cluster.device if config.cluster.name == "local" else "cpu"
    return kind == "cuda" or (kind == "auto" and settings.gpus > 0 and devices.torch_has_cuda())


def expected(one: Need, config: DictConfig, settings: Settings) -> Allocation:
    """The job in which a point will run: what the user asks Slurm for, and more of it where the point needs more."""
    given = (settings.gpus if one.gpus else settings.tasks or settings.gpus) or 1
    typed = config.cluster.devices or given
    nodes = settings.nodes or config.cluster.nodes or (1 if one.together else -(-one.devices // typed))
    each = max(given, one.devices if one.together else -(-one.devices // nodes))
    return Allocation("", (each,) * nodes, each if one.gpus else 0)


def shape(needs: Sequence[Need], settings: Settings, partition: Partition) -> Shape:
    """Nodes and tasks for the largest need; settings of the user are kept. Raises CannotRun if these are too few."""
    on_gpus, on_cpus = [one for one in needs if one.gpus], [one for one in needs if not one.gpus]
    problems = [*_no_gpus(on_gpus, settings, partition), *_no_end(on_cpus, settings)]
    refuse([*problems, *_no_such_node(on_gpus, on_cpus, settings, partition)], TITLE)
    room = settings.tasks or settings.gpus or max(1, partition.cpus // settings.cpus)
    nodes = settings.nodes or max(-(-_largest(on_gpus) // max(1, settings.gpus)), -(-_largest(on_cpus) // room))
    tasks = settings.tasks or settings.gpus or max(_together(on_cpus), -(-_largest(on_cpus) // nodes))
    few_gpus = _too_few(on_gpus, nodes, "slurm.gpus", settings.gpus)
    refuse([*few_gpus, *_too_few(on_cpus, nodes, "slurm.tasks", tasks)], TITLE)
    return Shape(nodes, tasks)


def _largest(needs: Sequence[Need]) -> int:
    return max((one.devices for one in needs), default=1)


def _together(needs: Sequence[Need]) -> int:
    return max((one.devices for one in needs if one.together), default=1)


def _no_gpus(needs: Sequence[Need], settings: Settings, partition: Partition) -> list[Problem]:
    if not needs or settings.gpus:
        return []
    each = -(-_largest(needs) // (settings.nodes or 1))
    least = max(_together(needs), min(each, partition.gpus or each))
    message = "needs GPUs, and a node gets none: slurm.gpus 0"
    return [Problem("cluster.device", "cuda", message, ({"slurm.gpus": least},))]


def _no_end(needs: Sequence[Need], settings: Settings) -> list[Problem]:
    if not any(one.all for one in needs) or settings.nodes or settings.tasks or settings.gpus:
        return []
    message = "is not given, and points without mesh.* or cluster.devices take all that a job gets"
    return [Problem("slurm.tasks", None, message, ({"slurm.nodes": 2, "slurm.tasks": 2},), "mesh.*=...")]


def _no_such_node(
    on_gpus: Sequence[Need], on_cpus: Sequence[Need], settings: Settings, partition: Partition
) -> list[Problem]:
    """Points of one node that are larger than any node. `partition.shortages` reports a partition without GPUs, or with
    fewer CPUs than one task has."""
    tasks = partition.cpus // settings.cpus
    found = []
    for needs, room, key, has in (
        (on_gpus, partition.gpus, "slurm.gpus", f"{partition.gpus} GPUs"),
        (on_cpus, tasks, "slurm.tasks", f"{partition.cpus} CPUs"),
    ):
        largest = max((one for one in needs if one.together), key=lambda one: one.devices, default=None)
        if largest and largest.devices > room > 0:
            who = "launch.ranks=fork keeps" if largest.forked else "an engine of one process holds"
            cpus = f"x slurm.cpus {settings.cpus} " if needs is on_cpus else ""
            all_of = f"{who} all {largest.devices} devices on one node"
            message = f"{cpus}is too many: {all_of}, partition {partition.name} has {has} on a node"
            fix: Fix = {"launch.ranks": "auto"} if largest.forked else {"mesh.pipeline": room}
            hint = "" if largest.forked else "an engine of ranks"
            found.append(Problem(key, largest.devices, message, (fix,), hint))
    return found


def _too_few(needs: Sequence[Need], nodes: int, key: str, each: int) -> list[Problem]:
    """Return the problems of points that need more than so many nodes with `each` devices; `key` sets these."""
    if not needs:
        return []
    largest, together, problems = _largest(needs), _together(needs), []
    if nodes * each < largest:
        message = f"x {key} {each} make {nodes * each} devices, the largest point needs {largest}"
        problems.append(Problem("slurm.nodes", nodes, message, ({"slurm.nodes": -(-largest // each)},)))
    if each < together:
        who = "the largest point of one process, or of ranks that it forks,"
        message = f"is too few, {who} needs {together} devices on one node"
        problems.append(Problem(key, each, message, ({key: together},)))
    return problems
