"""A sweep's folder as Slurm's arrays know it: its points by index, and the jobs that were submitted for them.

FOLDER/points.jsonl      a line for each point; an index stays what it is, further points are appended
FOLDER/slurm/            jobs.jsonl: a line for each array; settings.json and array.sbatch: the last one's; logs
FOLDER/ID/               the run of a point, as a local sweep has it
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.cli import compose
from harness.config import registry
from harness.core import files
from harness.core.problem import CannotRun, Problem
from harness.sweep.points import Point
from slurm import commands
from slurm.resources import Shape
from slurm.script import Places, script
from slurm.settings import TITLE, Settings

POINTS = "points.jsonl"
OWN = "slurm"
JOBS, SETTINGS, SCRIPT, LOCK = "jobs.jsonl", "settings.json", "array.sbatch", ".lock"


@dataclass(frozen=True)
class Job:
    """One submitted array: its indices, and the user's own folder of choices (--config-dir)."""

    id: str
    indices: tuple[int, ...]
    config_dir: str | None = None


class Array:
    """The folder of a sweep; raises CannotRun for one whose name no sbatch file can hold."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        if not str(self.folder).isprintable() or "\\" in str(self.folder):
            message = "has a line break or a backslash in its name, Slurm cannot write a log there"
            raise CannotRun([Problem("out", repr(str(self.folder)), message, hint="out=DIR")], TITLE)
        self.own = self.folder / OWN

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Lock the array for one submission; a second one waits for sbatch, which has a time limit."""
        self.own.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.own / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def points(self) -> list[Point]:
        """All points, by index."""
        return [Point(line["id"], tuple(line["overrides"])) for line in _lines(self.folder / POINTS)]

    def add(self, points: Sequence[Point]) -> list[int]:
        """The indices of these points; those that the folder does not have yet are appended."""
        indices, known = self.indices(points), self.points()
        new = [point for index, point in zip(indices, points, strict=True) if index >= len(known)]
        if new:
            lines = ({"id": one.id, "overrides": one.overrides} for one in [*known, *new])
            files.write_text(self.folder / POINTS, _text(lines))
        return indices

    def indices(self, points: Sequence[Point]) -> list[int]:
        """The indices that these different points have, or will have once they are added."""
        known = {point.id: index for index, point in enumerate(self.points())}
        further = itertools.count(len(known))
        return [known[point.id] if point.id in known else next(further) for point in points]

    def run(self, point: Point) -> Path:
        """The folder of a point's run."""
        return self.folder / point.id

    def jobs(self) -> list[Job]:
        """Return the submitted jobs in order."""
        lines = _lines(self.own / JOBS)
        return [Job(line["job"], tuple(line["indices"]), line.get("config_dir")) for line in lines]

    def log(self, job: str, index: int) -> Path:
        """Return the path of the log of a point's batch step."""
        return self.own / f"{job}_{index}.log"

    def settings(self) -> Settings | None:
        """Return the settings of the last submission, if there is one."""
        path = self.own / SETTINGS
        return Settings.load(path) if path.exists() else None

    def places(self) -> Places:
        """What the file for sbatch names. Raises CannotRun for a path that it cannot hold."""
        return Places(self.folder, self.own, Path.cwd(), registry.ROOT, Path(sys.executable), compose.further())

    def submit(self, indices: Sequence[int], settings: Settings, shape: Shape, grace_s: float) -> str:
        """Submit these points as one array; returns its job id. Raises CannotRun with the message of sbatch.

        An array that cannot be recorded (a full disk) is cancelled: nobody would know of it.
        """
        places = self.places()
        files.write_text(self.own / SCRIPT, script(settings, shape, indices, places, grace_s))
        former = self.jobs()
        job = commands.ask(["sbatch", "--parsable", str(self.own / SCRIPT)]).strip().partition(";")[0]
        known = [*former, Job(job, tuple(indices), places.config_dir)]
        lines = ({"job": one.id, "indices": one.indices, "config_dir": one.config_dir} for one in known)
        try:
            settings.save(self.own / SETTINGS)
            files.write_text(self.own / JOBS, _text(lines))
        except OSError:
            commands.ask(["scancel", job])
            raise
        return job


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _text(lines: Iterable[dict[str, Any]]) -> str:
    return "".join(f"{json.dumps(line)}\n" for line in lines)
