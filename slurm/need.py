"""From the points of a sweep to what one array asks for: nodes, and tasks on each, enough for the largest point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from omegaconf import DictConfig

from harness import check, registry
from harness.interfaces import Engine
from harness.problem import CannotRun, Problem
from slurm.partition import Partition
from slurm.settings import TITLE, Settings


@dataclass(frozen=True)
class Need:
    """Devices of a point. `together`: on one node, as one process holds them all. `all`: it takes what there is."""

    devices: int
    together: bool = False
    all: bool = False


@dataclass(frozen=True)
class Shape:
    """What each index of the array gets."""

    nodes: int
    tasks: int

    @property
    def devices(self) -> int:
        return self.nodes * self.tasks


def need(config: DictConfig) -> Need:
    """What the mesh of a point takes. One that only plans or simulates takes one task."""
    if config.mode != "run":
        return Need(1)
    engine: Engine = registry.build("engine", config.engine)
    can = engine.capabilities
    given = [config.mesh[name] for name in check.DEGREES if getattr(can, name)]
    stages = len(check.stated(config))
    free = bool(given) and not any(given) and not stages and not config.cluster.devices
    product = math.prod(degree or 1 for degree in given)
    typed = (config.cluster.devices or 1) * (config.cluster.nodes or 1)
    return Need(max(product, stages, typed), not can.ranks, free)


def shape(found: Sequence[Need], settings: Settings, partition: Partition) -> Shape:
    """Nodes and tasks for the largest of the needs; what the user gives counts. Raises CannotRun if that is too few."""
    largest = max((one.devices for one in found), default=1)
    together = max((one.devices for one in found if one.together), default=1)
    if any(one.all for one in found) and not (settings.nodes or settings.tasks or settings.gpus):
        what = "points without mesh.* or cluster.devices take all that a job gets, and that is not given"
        raise CannotRun([Problem("slurm.tasks", what, "slurm.nodes=2 slurm.tasks=2, or mesh.*=...")], TITLE)
    room = settings.tasks or settings.gpus or max(1, partition.cpus // settings.cpus)
    nodes = settings.nodes or -(-largest // room)
    tasks = settings.tasks or settings.gpus or max(together, -(-largest // nodes))
    chosen = Shape(nodes, tasks)
    problems = []
    if chosen.devices < largest:
        what = f"make {chosen.devices} devices, the largest point needs {largest}"
        problems.append(Problem(_typed(chosen), what, f"slurm.nodes={-(-largest // tasks)}"))
    if tasks < together:
        what = f"an engine of one process needs {together} devices on one node"
        problems.append(Problem(f"slurm.tasks {tasks}", what, f"slurm.tasks={together}"))
    if problems:
        raise CannotRun(problems, TITLE)
    return chosen


def _typed(chosen: Shape) -> str:
    return f"slurm.nodes {chosen.nodes} x slurm.tasks {chosen.tasks}"
