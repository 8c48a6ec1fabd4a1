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
from typing import TypeVar

from harness.config import registry
from harness.core import files
from harness.core.problem import CannotRun, Problem
from harness.core.run_files import POINTS
from harness.core.serialization import SchemaError, decode, encode, parse
from harness.sweep.points import Point
from slurm import commands
from slurm.resources import Shape
from slurm.script import Places, script
from slurm.settings import TITLE, Settings

OWN = "slurm"
JOBS, SETTINGS, SCRIPT, LOCK = "jobs.jsonl", "settings.json", "array.sbatch", ".lock"
Line = TypeVar("Line")


@dataclass(frozen=True)
class Job:
    """One submitted array: its id, its indices, and the user's own folder of choices (--config-dir)."""

    job: str
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
        """All points, by index. Raises CannotRun for a file that is damaged."""
        return _lines(Point, self.folder / POINTS)

    def add(self, points: Sequence[Point]) -> list[int]:
        """The indices of these points; those that the folder does not have yet are appended."""
        indices, known = self.indices(points), self.points()
        new = [point for index, point in zip(indices, points, strict=True) if index >= len(known)]
        if new:
            files.write_text(self.folder / POINTS, _text([*known, *new]))
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
        """Return the submitted jobs in order; raises as `points`."""
        return _lines(Job, self.own / JOBS)

    def log(self, job: str, index: int) -> Path:
        """Return the path of the log of a point's batch step."""
        return self.own / f"{job}_{index}.log"

    def settings(self) -> Settings | None:
        """Return the settings of the last submission, if there is one. Raises CannotRun for a file that is damaged."""
        path = self.own / SETTINGS
        try:
            return Settings.load(path)
        except FileNotFoundError:
            return None
        except (OSError, SchemaError) as error:
            raise _damaged(path, error) from error

    def places(self) -> Places:
        """What the file for sbatch names. Raises CannotRun for a path that it cannot hold."""
        return Places(self.folder, self.own, Path.cwd(), registry.ROOT, Path(sys.executable), registry.further())

    def submit(self, indices: Sequence[int], settings: Settings, shape: Shape, grace_s: float) -> str:
        """Submit these points as one array; returns its job id. Raises CannotRun with the message of sbatch.

        An array that cannot be recorded (a full disk) is cancelled: nobody would know of it.
        """
        places = self.places()
        files.write_text(self.own / SCRIPT, script(settings, shape, indices, places, grace_s))
        former = self.jobs()
        job = commands.ask(["sbatch", "--parsable", str(self.own / SCRIPT)]).strip().partition(";")[0]
        known = [*former, Job(job, tuple(indices), places.config_dir)]
        try:
            settings.save(self.own / SETTINGS)
            files.write_text(self.own / JOBS, _text(known))
        except OSError:
            commands.ask(["scancel", job])
            raise
        return job


def _lines(kind: type[Line], path: Path) -> list[Line]:
    """What the lines of a file hold; nothing if it is missing. Raises CannotRun for a file that is damaged."""
    try:
        return [decode(kind, parse(line)) for line in files.read_bytes(path).splitlines()]
    except FileNotFoundError:
        return []
    except (OSError, SchemaError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> CannotRun:
    reason = error.strerror if isinstance(error, OSError) else error
    return CannotRun([Problem(str(path), None, f"is damaged: {reason}", hint="out=DIR, another folder")], TITLE)


def _text(lines: Iterable[Point | Job]) -> str:
    return "".join(f"{json.dumps(encode(line))}\n" for line in lines)
