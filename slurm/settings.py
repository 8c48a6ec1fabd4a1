"""The keys `slurm.*` of a submission, typed and checked like those of run.py."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from harness.config.overrides import parse, value_problem
from harness.core.problem import Problem, refuse
from harness.core.serialization import Document
from harness.core.value_checks import at_least

PREFIX = "slurm."
TITLE = "this array"
TIME = re.compile(
    r"(?:(?P<days>\d+)-(?P<hours>\d+)(?::(?P<minutes>\d+)(?::(?P<seconds>\d+))?)?"
    r"|(?:(?P<h>\d+):)?(?P<m>\d+):(?P<s>\d+)|(?P<only>\d+))"
)
"""Slurm's formats of a time: minutes, [hours:]minutes:seconds, days-hours[:minutes[:seconds]]."""


@dataclass(frozen=True)
class Settings(Document):
    """`slurm.nodes=2 slurm.time=1:00:00`; what is null follows from the points, or is left to Slurm."""

    partition: str | None = None
    """Slurm partition; null: the default one."""
    nodes: int | None = None
    """Number of nodes for each point; null: as many as the largest point needs."""
    tasks: int | None = None
    """Tasks on each node, one for each device; null: slurm.gpus, or as many as the largest point needs."""
    cpus: int = 1
    """Number of CPUs for each task."""
    gpus: int = 0
    """Number of GPUs on each node."""
    time: str = "1:00:00"
    """Time limit of one start of a point. Half a minute plus launch.grace_s before it ends, the point writes a
    checkpoint and is requeued."""
    mem: str | None = None
    """Memory on each node (for example 4G); null: the partition's default."""
    parallel: int | None = None
    """The most points of this array that run at once; null: no limit."""
    account: str | None = None
    """Slurm account that is charged; null: the default one."""
    qos: str | None = None
    """Quality of service; null: the default one."""
    constraint: str | None = None
    """Features that nodes must have; null: none."""


def split(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """The overrides of the sweep, and those of `slurm.*`."""
    own = [text for text in overrides if text.startswith(PREFIX)]
    return [text for text in overrides if not text.startswith(PREFIX)], own


def read(overrides: Sequence[str], former: Settings | None = None) -> Settings:
    """The settings that `slurm.*` overrides give, on top of `former`. Raises CannotRun with all that is wrong."""
    config: Any = OmegaConf.create({"slurm": OmegaConf.structured(Settings)})
    OmegaConf.set_readonly(config.slurm, False)
    for key, value in vars(former or Settings()).items():
        config.slurm[key] = value
    parsed, problems = parse(overrides, lambda group: [], [])
    for override in parsed.values:
        if problem := value_problem(config, override):
            problems.append(problem)
        else:
            OmegaConf.update(config, override.key_or_group, override.value())
    values: Any = OmegaConf.to_container(config.slurm)
    settings = Settings(**values)
    refuse([*problems, *_impossible(settings)], TITLE)
    return settings


def minutes(text: str) -> float | None:
    """The minutes of a time as Slurm writes it: "1-0" is 1440, "90:00" and "90" are 90.

    None for UNLIMITED and for text that is no time.
    """
    match = TIME.fullmatch(text)
    if not match:
        return None
    part = {name: int(value or 0) for name, value in match.groupdict().items()}
    total = part["days"] * 1440 + (part["hours"] + part["h"]) * 60 + part["minutes"] + part["m"] + part["only"]
    return total + (part["seconds"] + part["s"]) / 60


def _impossible(settings: Settings) -> list[Problem]:
    smallest = {"nodes": 1, "tasks": 1, "cpus": 1, "gpus": 0, "parallel": 1}
    found = [one for key, least in smallest.items() for one in at_least(f"slurm.{key}", getattr(settings, key), least)]
    if not minutes(settings.time):
        message = "is no time: minutes, hours:minutes:seconds or days-hours"
        found.append(Problem("slurm.time", settings.time, message, ({"slurm.time": "1:00:00"},)))
    if settings.mem is not None and not re.fullmatch(r"\d+[KMGT]?", settings.mem):
        found.append(Problem("slurm.mem", settings.mem, "is no size", ({"slurm.mem": "4G"},)))
    for key in ("partition", "account", "qos", "constraint"):
        value = getattr(settings, key)
        if value is not None and (not value.isprintable() or not value or value.startswith("-")):
            found.append(Problem(f"slurm.{key}", repr(value), "is no name", hint=f"slurm.{key}=NAME"))
    return found
