"""The folder of a run and the record in it.

    make_folder     runs/2025-01-31/20250131-235959-1a2b3c, or what `out` says
    in_use          whoever else uses it is not disturbed
    RunFolder       a new run in it: a good earlier run stays until the new one is accepted

        out/            the earlier run, untouched
        out/.new/       the new one, until `accept` moves it to out/ or it is refused

A run that is killed loses nothing of an earlier one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from harness.core import run_files
from harness.core.problem import CannotRun, Fix, Problem
from harness.core.record import RunRecord, Status
from harness.core.run_files import LOCK, RECORD, TRACE
from harness.core.serialization import SchemaError, finite
from harness.launch.failure import Failure
from harness.run import checkpoint_files, folder_lock
from harness.run.folder_lock import Busy, Lock

NEW = ".new"


def new_id(overrides: Sequence[str]) -> str:
    """Short, unique and in order of time: 20250131-235959-1a2b3c."""
    now = time.time_ns()
    digest = hashlib.blake2b(repr((list(overrides), now, os.getpid())).encode(), digest_size=3).hexdigest()
    return f"{datetime.fromtimestamp(now / 1e9):%Y%m%d-%H%M%S}-{digest}"


def make_folder(out: str | None, record_id: str) -> Path:
    """`out`, or runs/<date>/<id>. Raises `CannotRun` where that cannot be a folder that can be written."""
    date = f"{record_id[:4]}-{record_id[4:6]}-{record_id[6:8]}"
    folder = Path(out) if out else Path("runs") / date / record_id
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = Problem("out", str(folder), f"cannot be made a folder: {error.strerror}", hint="out=DIR")
        raise CannotRun([problem]) from error
    except ValueError as error:  # a null byte
        raise CannotRun([Problem("out", str(folder), f"is no path: {error}", hint="out=DIR")]) from error
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        problem = Problem("out", str(folder), f"cannot be written: {error.strerror}", hint="out=DIR")
        raise CannotRun([problem]) from error
    return folder.resolve()


@contextmanager
def in_use(path: Path, title: str) -> Iterator[Lock]:
    """Hold the lock of a run's folder. Raises `CannotRun` where another process has it, and where there can be none."""
    with ExitStack() as stack:
        try:
            lock = stack.enter_context(folder_lock.held(path, folder_lock.PATIENCE_S))
        except Busy as error:
            other: Fix = {"out": f"{path}-2"}
            raise CannotRun([Problem("out", str(path), f"is in use by {error}", (other,))], title) from None
        except OSError as error:
            message = f"cannot be used, its file {LOCK} cannot be opened and locked: {error.strerror}"
            raise CannotRun([Problem("out", str(path), message, hint="out=DIR")], title) from error
        yield lock


class RunFolder:
    """The folder `path` of a run; the run's files are in `work`, which is `path` once the run is accepted.

    `record` is what record.json says, from the first `update` on.
    """

    def __init__(self, path: Path, record: RunRecord) -> None:
        self.path = self.work = path
        self.record = record

    def start(self) -> None:
        """Start a new run: next to a good earlier one, or in place of what an earlier one has left."""
        shutil.rmtree(self.path / NEW, ignore_errors=True)  # of a run that was killed
        if good_run(self.path):
            self.work = self.path / NEW
            self.work.mkdir()
        elif (self.path / RECORD).exists():
            self._clear()
        else:
            checkpoint_files.remove_all(self.path)

    def resume(self, record_id: str) -> None:
        """Continue the run in the folder, without the files about how it ended."""
        for name in run_files.OF_END:
            (self.path / name).unlink(missing_ok=True)
        self.record = replace(self.record, id=record_id)

    def accept(self) -> None:
        """Put the new run in the place of the earlier one."""
        if self.work == self.path:
            return
        self._clear()
        for file in self.work.iterdir():
            file.replace(self.path / file.name)
        self.work.rmdir()
        self.work = self.path

    def update(self, **changes: Any) -> None:
        """Change the record, here and on disk; numbers that are not finite become null."""
        self.record = replace(self.record, **finite(changes))
        self.record.save(self.work / RECORD)

    def finish(self, status: Status, reason: str, problems: tuple[Problem, ...] = ()) -> str:
        """Write how the run ended; returns what the user must know about its files.

        A new run that is infeasible is removed if it has not taken the place of a good earlier one.
        """
        self.record = replace(self.record, problems=problems)
        if status == "infeasible" and self.work != self.path:
            self.record = replace(self.record, status=status, reason=reason)
            shutil.rmtree(self.work)
            return f"the earlier run in {self.path} is kept"
        self.accept()
        try:
            self.update(status=status, reason=reason)
        except OSError as error:
            return self._finish_without_room(Failure.of(error))
        return ""

    def _finish_without_room(self, failure: Failure) -> str:
        """The status is worth more than copies and pictures, which make room."""
        self.record = replace(self.record, status=failure.status, reason=failure.message)
        try:
            for name in (*run_files.SPARE, *([TRACE] if self.record.source == "simulated" else [])):
                (self.path / name).unlink(missing_ok=True)
            self.record.save(self.path / RECORD)
        except OSError as error:
            return f"the record could not be written: {error.strerror}: {self.path / RECORD}"
        return ""

    def _clear(self) -> None:
        """Remove the run in the folder; the record last, since it makes the other files a run."""
        for name in sorted(run_files.ALL, key=lambda name: name == RECORD):
            path = self.path / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def good_run(folder: Path) -> RunRecord | None:
    """The record of the run in a folder if it ended well or can be resumed."""
    try:
        record = RunRecord.load(folder / RECORD)
    except (SchemaError, OSError):
        return None
    return record if record.status == "ok" or checkpoint_files.steps(folder) else None
