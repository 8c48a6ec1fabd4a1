"""The file for sbatch: readable, and without any text of an override (points.jsonl has these)."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.config.registry import FURTHER
from harness.core.problem import Problem, refuse
from slurm.resources import Shape
from slurm.settings import TITLE, Settings

SPARE_S = 30
"""Slurm signals the parent of a point so long before its time limit, in addition to the time that a run has to stop."""


@dataclass(frozen=True)
class Places:
    """The sweep's folder, where the logs go, the user's working directory, this project and its Python, and the user's
    own folder of choices, if there is one; absolute.

    Raises CannotRun for a path with a line break, or another character that is not printable: it would end a line of
    the file, and what follows would be run.
    """

    folder: Path
    logs: Path
    working: Path
    root: Path
    python: Path
    config_dir: str | None = None

    def __post_init__(self) -> None:
        named = {
            "out": (self.folder, "out=DIR"),
            "slurm logs": (self.logs, "out=DIR"),
            "--config-dir": (self.config_dir or "", "--config-dir DIR"),
            "working directory": (self.working, "cd to a folder without one"),
            "project": (self.root, "move this project"),
            "python": (self.python, "move the Python environment"),
        }
        message = "has a line break, or another character that is not printable: no sbatch file can hold it"
        refuse(
            [
                Problem(key, repr(str(path)), message, hint=hint)
                for key, (path, hint) in named.items()
                if path and not str(path).isprintable()
            ],
            TITLE,
        )


def script(settings: Settings, shape: Shape, indices: Sequence[int], places: Places, grace_s: float) -> str:
    """The text of the file: an array of `indices`, each with the nodes and tasks of `shape`, `grace_s` to stop."""
    options = {
        "job-name": re.sub(r"[^\w.-]+", "-", places.folder.name),
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "constraint": settings.constraint,
        "array": ranges(indices) + (f"%{settings.parallel}" if settings.parallel else ""),
        "nodes": str(shape.nodes),
        "ntasks-per-node": str(shape.tasks),
        "cpus-per-task": str(settings.cpus),
        "gpus-per-node": str(settings.gpus) if settings.gpus else None,
        "mem": settings.mem,
        "time": settings.time,
        "signal": f"B:USR1@{SPARE_S + math.ceil(grace_s)}",
        "output": str(places.logs).replace("%", "%%") + "/%A_%a.log",
        "open-mode": "append",
        "chdir": str(places.working),
        "export": "ALL",
    }
    lines = [f"#SBATCH --{key}={_quoted(value)}" for key, value in options.items() if value is not None]
    own = [f"export {FURTHER}={shlex.quote(places.config_dir)}"] if places.config_dir else []
    python, folder = shlex.quote(str(places.python)), shlex.quote(str(places.folder))
    return "\n".join(
        [
            "#!/bin/bash",
            "# One array for the points of a sweep; written by python -m slurm.submit, which submits it.",
            *lines,
            "#SBATCH --requeue",
            "",
            "# The batch step is the parent of its point: Slurm's signals reach it, and it starts the ranks.",
            f"export PYTHONPATH={shlex.quote(str(places.root))}${{PYTHONPATH:+:$PYTHONPATH}}",
            *own,
            f'exec {python} -P -m slurm.task {folder} "$SLURM_ARRAY_TASK_ID"',
            "",
        ]
    )


def ranges(indices: Sequence[int]) -> str:
    """[0, 1, 2, 5, 7, 8] is 0-2,5,7-8"""
    parts: list[list[int]] = []
    for index in sorted(indices):
        if parts and index == parts[-1][-1] + 1:
            parts[-1][1:] = [index]
        else:
            parts.append([index])
    return ",".join("-".join(map(str, part)) for part in parts)


def _quoted(value: str) -> str:
    """Quote a value for sbatch: bare if that is safe, else in double quotes."""
    if re.fullmatch(r"[\w@%+=:,./-]+", value):
        return value
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
