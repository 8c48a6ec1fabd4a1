"""From the points of a sweep to what one array asks for: nodes, and tasks on each, enough for the largest point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from omegaconf import DictConfig

from harness import check, devices, registry
from harness.allocation import Allocation
from harness.interfaces import Engine
from harness.problem import CannotRun, Problem
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
    """What each index of the array gets."""

    nodes: int
    tasks: int


def need(config: DictConfig, settings: Settings) -> Need:
    """What the mesh of a point takes. One that only plans or simulates takes one task."""
    gpus = _on_gpus(config, settings)
    if config.mode != "run":
        return Need(1, gpus=gpus)
    engine: Engine = registry.build("engine", config.engine)
    can = engine.capabilities
    given = [config.mesh[name] for name in check.DEGREES if getattr(can, name)]
    stages = len(check.stated(config))
    free = bool(given) and not any(given) and not stages and not config.cluster.devices
    product = math.prod(degree or 1 for degree in given)
    typed = (config.cluster.devices or 1) * (config.cluster.nodes or 1)
    forked = can.ranks and config.launch.ranks == "fork"
    return Need(max(product, stages, typed), not can.ranks or forked, free, gpus, forked)


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


def shape(found: Sequence[Need], settings: Settings, partition: Partition) -> Shape:
    """Nodes and tasks for the largest of the needs; what the user gives counts. Raises CannotRun if that is too few."""
    on_gpus, on_cpus = [one for one in found if one.gpus], [one for one in found if not one.gpus]
    problems = [*_no_gpus(on_gpus, settings, partition), *_no_end(on_cpus, settings)]
    if problems := [*problems, *_no_such_node(on_gpus, on_cpus, settings, partition)]:
        raise CannotRun(problems, TITLE)
    room = settings.tasks or settings.gpus or max(1, partition.cpus // settings.cpus)
    nodes = settings.nodes or max(-(-_largest(on_gpus) // max(1, settings.gpus)), -(-_largest(on_cpus) // room))
    tasks = settings.tasks or settings.gpus or max(_together(on_cpus), -(-_largest(on_cpus) // nodes))
    problems = [*_too_few(on_gpus, nodes, "slurm.gpus", settings.gpus), *_too_few(on_cpus, nodes, "slurm.tasks", tasks)]
    if problems:
        raise CannotRun(problems, TITLE)
    return Shape(nodes, tasks)


def _largest(found: Sequence[Need]) -> int:
    return max((one.devices for one in found), default=1)


def _together(found: Sequence[Need]) -> int:
    return max((one.devices for one in found if one.together), default=1)


def _no_gpus(found: Sequence[Need], settings: Settings, partition: Partition) -> list[Problem]:
    if not found or settings.gpus:
        return []
    each = -(-_largest(found) // (settings.nodes or 1))
    least = max(_together(found), min(each, partition.gpus or each))
    return [Problem("cluster.device cuda", "needs GPUs, and a node gets none: slurm.gpus 0", f"slurm.gpus={least}")]


def _no_end(found: Sequence[Need], settings: Settings) -> list[Problem]:
    if not any(one.all for one in found) or settings.nodes or settings.tasks or settings.gpus:
        return []
    what = "points without mesh.* or cluster.devices take all that a job gets, and that is not given"
    return [Problem("slurm.tasks", what, "slurm.nodes=2 slurm.tasks=2, or mesh.*=...")]


def _no_such_node(
    on_gpus: Sequence[Need], on_cpus: Sequence[Need], settings: Settings, partition: Partition
) -> list[Problem]:  # fmt: skip
    """Points of one node that are larger than any; a partition without GPUs, or with fewer CPUs than one task has, is
    told of elsewhere."""
    tasks = partition.cpus // settings.cpus
    found = []
    for needs, room, key, has in (
        (on_gpus, partition.gpus, "slurm.gpus {}", f"{partition.gpus} GPUs"),
        (on_cpus, tasks, f"slurm.tasks {{}} x slurm.cpus {settings.cpus}", f"{partition.cpus} CPUs"),
    ):
        largest = max((one for one in needs if one.together), key=lambda one: one.devices, default=None)
        if largest and largest.devices > room > 0:
            who = "launch.ranks=fork keeps" if largest.forked else "an engine of one process holds"
            what = f"{who} all {largest.devices} devices on one node, partition {partition.name} has {has} on a node"
            mend = "launch.ranks=auto" if largest.forked else f"mesh.pipeline={room}, or an engine of ranks"
            found.append(Problem(key.format(largest.devices), what, mend))
    return found


def _too_few(found: Sequence[Need], nodes: int, key: str, each: int) -> list[Problem]:
    """What so many nodes with `each` devices do not have; `key` is what gives these."""
    if not found:
        return []
    largest, together, problems = _largest(found), _together(found), []
    if nodes * each < largest:
        what = f"make {nodes * each} devices, the largest point needs {largest}"
        problems.append(Problem(f"slurm.nodes {nodes} x {key} {each}", what, f"slurm.nodes={-(-largest // each)}"))
    if each < together:
        what = f"the largest point of one process, or of ranks that it forks, needs {together} devices on one node"
        problems.append(Problem(f"{key} {each}", what, f"{key}={together}"))
    return problems
