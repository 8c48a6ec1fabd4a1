"""The partitions that Slurm has, and what of a request they cannot give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.config_check import closest
from harness.problem import CannotRun, Problem
from slurm import client
from slurm.settings import TITLE, Settings, minutes

FORMAT = "%P|%D|%c|%m|%G|%l|%a"
UNITS_MB = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1 << 20}


@dataclass(frozen=True)
class Partition:
    """`cpus`, `memory_mb` and `gpus` are those of its largest node."""

    name: str
    nodes: int
    cpus: int
    memory_mb: int
    gpus: int
    limit: str
    default: bool
    up: bool


def partitions() -> list[Partition]:
    """All that this user may see, as `sinfo` tells. Raises CannotRun without Slurm."""
    found: dict[str, Partition] = {}
    for line in client.ask(["sinfo", "-h", "-e", "-o", FORMAT]).splitlines():
        name, nodes, cpus, memory, gres, limit, state = (part.strip() for part in line.split("|"))
        one = Partition(name.rstrip("*"), int(nodes), _number(cpus), _number(memory), _gpus(gres), limit,
                        name.endswith("*"), state == "up")  # fmt: skip
        former = found.setdefault(one.name, one)
        if former is not one:  # nodes that are not alike
            found[one.name] = Partition(
                one.name, former.nodes + one.nodes, max(former.cpus, one.cpus), max(former.memory_mb, one.memory_mb),
                max(former.gpus, one.gpus), limit, one.default, one.up,
            )  # fmt: skip
    return list(found.values())


def choose(settings: Settings, known: Sequence[Partition]) -> Partition:
    """The partition that the settings name, or the default one. Raises CannotRun."""
    names = [one.name for one in known]
    for one in known:
        if one.name == settings.partition or (settings.partition is None and one.default):
            return one
    if settings.partition is None:
        problem = Problem("slurm.partition", f"there is no default one, only {', '.join(names)}", "slurm.partition=...")
    else:
        mend = f"slurm.partition={closest(settings.partition, names)}" if names else ""
        problem = Problem(f"slurm.partition {settings.partition}", f"is not one of {', '.join(names)}", mend)
    raise CannotRun([problem], TITLE)


def shortages(settings: Settings, nodes: int, tasks: int, partition: Partition) -> list[Problem]:
    """What the partition does not have of `nodes` with `tasks` on each, and of everything else that is asked for."""
    where = f"partition {partition.name}"
    found = []
    if not partition.up:
        found.append(Problem(f"slurm.partition {partition.name}", "is down", "slurm.partition=..., see sinfo"))
    if nodes > partition.nodes:
        what = f"{where} has {partition.nodes}"
        found.append(Problem(f"slurm.nodes {nodes}", what, f"slurm.nodes={partition.nodes}, or smaller points"))
    if tasks * settings.cpus > partition.cpus:
        what = f"needs {tasks * settings.cpus} CPUs on each node, {where} has {partition.cpus}"
        mend = _fewer_tasks(nodes * tasks, settings, partition.cpus // settings.cpus) or f"slurm.cpus={partition.cpus}"
        found.append(Problem(f"slurm.tasks {tasks} x slurm.cpus {settings.cpus}", what, mend))
    if settings.gpus > partition.gpus:
        what = f"{where} has {partition.gpus} on a node"
        found.append(Problem(f"slurm.gpus {settings.gpus}", what, f"slurm.gpus={partition.gpus}"))
    wanted, limit = minutes(settings.time), minutes(partition.limit)
    if wanted and limit and wanted > limit:
        what = f"{where} allows {partition.limit}"
        found.append(Problem(f"slurm.time {settings.time}", what, f"slurm.time={partition.limit}"))
    if settings.mem and (megabytes := _megabytes(settings.mem)) > partition.memory_mb:
        what = f"is {megabytes:.0f} MB, {where} has {partition.memory_mb} MB on a node"
        found.append(Problem(f"slurm.mem {settings.mem}", what, f"slurm.mem={partition.memory_mb}M"))
    return found


def _fewer_tasks(tasks: int, settings: Settings, room: int) -> str:
    """What to type for all `tasks` where a node has `room` for some; more nodes do not help where tasks are given."""
    if not room:
        return ""
    return f"slurm.tasks={room}" if settings.tasks else f"slurm.nodes={-(-tasks // room)}"


def _megabytes(text: str) -> float:
    return float(text.rstrip("KMGT")) * UNITS_MB.get(text[-1], 1)


def _number(text: str) -> int:
    """4 of "4+": of nodes that are not alike the smallest, which sinfo -e does not mix up."""
    return int("".join(filter(str.isdigit, text)) or 0)


def _gpus(gres: str) -> int:
    """gpu:4, gpu:a100:4(S:0-1), (null)"""
    counts = [part.partition("(")[0].split(":") for part in gres.split(",") if part.startswith("gpu")]
    return sum(int(count[-1]) if count[-1].isdigit() else 1 for count in counts)
