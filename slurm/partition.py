"""The partitions of Slurm, and which part of a request they cannot satisfy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.core.problem import CannotRun, Fix, Problem
from harness.core.value_checks import closest
from slurm import commands
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
    """All that this user may see, from `sinfo`. Raises CannotRun without Slurm."""
    by_name: dict[str, Partition] = {}
    for line in commands.ask(["sinfo", "-h", "-e", "-o", FORMAT]).splitlines():
        name, nodes, cpus, memory, gres, limit, state = (part.strip() for part in line.split("|"))
        one = Partition(
            name.rstrip("*"),
            int(nodes),
            _number(cpus),
            _number(memory),
            _gpus(gres),
            limit,
            name.endswith("*"),
            state == "up",
        )
        former = by_name.setdefault(one.name, one)
        if former is not one:  # different nodes
            by_name[one.name] = Partition(
                one.name,
                former.nodes + one.nodes,
                max(former.cpus, one.cpus),
                max(former.memory_mb, one.memory_mb),
                max(former.gpus, one.gpus),
                limit,
                one.default,
                one.up,
            )
    return list(by_name.values())


def choose(settings: Settings, known: Sequence[Partition]) -> Partition:
    """The partition that the settings name, or the default one. Raises CannotRun."""
    names = [one.name for one in known]
    for one in known:
        if one.name == settings.partition or (settings.partition is None and one.default):
            return one
    if settings.partition is None:
        message = f"must be given: there is no default one, only {', '.join(names)}"
        fixes = tuple({"slurm.partition": name} for name in names)
    else:
        message = f"is not one of {', '.join(names)}"
        fixes = ({"slurm.partition": closest(settings.partition, names)},) if names else ()
    raise CannotRun([Problem("slurm.partition", settings.partition, message, fixes)], TITLE)


def shortages(settings: Settings, nodes: int, tasks: int, partition: Partition) -> list[Problem]:
    """Return the problems of a partition that lacks `nodes` with `tasks` on each, or another requested resource."""
    where = f"partition {partition.name}"
    found = []
    if not partition.up:
        found.append(Problem("slurm.partition", partition.name, "is down", hint="slurm.partition=..., see sinfo"))
    if nodes > partition.nodes:
        fix: Fix = {"slurm.nodes": partition.nodes}
        message = f"is too many, {where} has {partition.nodes}"
        found.append(Problem("slurm.nodes", nodes, message, (fix,), "smaller points"))
    if tasks * settings.cpus > partition.cpus:
        needs = f"needs {tasks * settings.cpus} CPUs on each node"
        message = f"x slurm.cpus {settings.cpus} {needs}, {where} has {partition.cpus}"
        fix = _fewer_tasks(nodes * tasks, settings, partition.cpus // settings.cpus) or {"slurm.cpus": partition.cpus}
        found.append(Problem("slurm.tasks", tasks, message, (fix,)))
    if settings.gpus > partition.gpus:
        message = f"is too many, {where} has {partition.gpus} on a node"
        found.append(Problem("slurm.gpus", settings.gpus, message, ({"slurm.gpus": partition.gpus},)))
    wanted, limit = minutes(settings.time), minutes(partition.limit)
    if wanted and limit and wanted > limit:
        message = f"is too long, {where} allows {partition.limit}"
        found.append(Problem("slurm.time", settings.time, message, ({"slurm.time": partition.limit},)))
    if settings.mem and (megabytes := _megabytes(settings.mem)) > partition.memory_mb:
        message = f"is {megabytes:.0f} MB, {where} has {partition.memory_mb} MB on a node"
        found.append(Problem("slurm.mem", settings.mem, message, ({"slurm.mem": f"{partition.memory_mb}M"},)))
    return found


def _fewer_tasks(tasks: int, settings: Settings, room: int) -> Fix:
    """A fix for all `tasks` where a node has `room` for some; more nodes do not help where tasks are given."""
    if not room:
        return {}
    return {"slurm.tasks": room} if settings.tasks else {"slurm.nodes": -(-tasks // room)}


def _megabytes(text: str) -> float:
    return float(text.rstrip("KMGT")) * UNITS_MB.get(text[-1], 1)


def _number(text: str) -> int:
    """4 of "4+": the smallest of different nodes, which sinfo -e lists apart."""
    return int("".join(filter(str.isdigit, text)) or 0)


def _gpus(gres: str) -> int:
    """gpu:4, gpu:a100:4(S:0-1), (null)"""
    counts = [part.partition("(")[0].split(":") for part in gres.split(",") if part.startswith("gpu")]
    return sum(int(count[-1]) if count[-1].isdigit() else 1 for count in counts)
