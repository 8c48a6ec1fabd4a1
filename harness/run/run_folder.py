"""The folder of a run and the record in it.

    make_folder     runs/2025-01-31/20250131-235959-1a2b3c, or what `out` says, if nothing there is lost by that
    in_use          whoever else uses it is not disturbed
    RunFolder       a new run in it: an earlier run stays until the new one, or its own next start, is accepted

        out/                the earlier run, untouched
        out/.new/           the new start, until `accept` moves it to out/ or it is refused
        out/refused.json    the record of one that was refused, until the next start

A start that is refused, fails before its plan is accepted or is killed loses nothing of an earlier run.
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

from harness.core import files, run_files
from harness.core.problem import CannotRun, Fix, Problem, spelled
from harness.core.record import RunRecord, Status
from harness.core.run_files import CHECKPOINTS, LOCK, LOG, METRICS, POINTS, RECORD, REFUSED, REFUSED_LOG, TABLE, TRACE
from harness.core.serialization import SchemaError, finite, parse
from harness.launch.failure import Failure
from harness.run import checkpoint_files, folder_lock
from harness.run.folder_lock import Busy, Lock
from harness.run.resume import Resumed, is_finished, trained_steps

NEW = ".new"
DEEPEST = 3
"""Levels below a folder in which it is looked for runs: runs/<date>/<id>, and what is above."""


def new_id(overrides: Sequence[str]) -> str:
    """Short, unique and in order of time: 20250131-235959-1a2b3c."""
    now = time.time_ns()
    digest = hashlib.blake2b(repr((list(overrides), now, os.getpid())).encode(), digest_size=3).hexdigest()
    return f"{datetime.fromtimestamp(now / 1e9):%Y%m%d-%H%M%S}-{digest}"


def make_folder(out: str | None, record_id: str, overwrite: bool = False) -> Path:
    """`out`, or runs/<date>/<id>. Raises `CannotRun` where that cannot be a folder that can be written, or is not one
    of a run and would be made one: it is inside a run's, above those of others, or has files of the user's."""
    date = f"{record_id[:4]}-{record_id[4:6]}-{record_id[6:8]}"
    folder = Path(out) if out else Path("runs") / date / record_id
    if out:
        refuse_no_place(folder)
        _refuse_above_runs(folder)
        _refuse_files_of_others(folder, overwrite)
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


def refuse_no_place(folder: Path) -> None:
    """Raise CannotRun for a folder whose name ends in blanks, and for one that is inside the folder of a run."""
    typed = str(folder)
    if typed != (name := typed.rstrip()):
        fixes: tuple[Fix, ...] = ({"out": name},) if name else ()
        raise CannotRun([Problem("out", spelled(typed), "ends in blanks", fixes, "" if name else "out=DIR")])
    try:
        above = folder.resolve().parents
        found = next((one for one in above if is_started(one) or _is_in_use(one)), None)
    except (OSError, ValueError, RuntimeError):  # what is no path, or a loop of links, is refused by name
        return
    if found:
        message = f"is in the folder of a run, {found}"
        raise CannotRun([Problem("out", str(folder), message, (_other_folder(found),))])


def is_started(folder: Path) -> bool:
    """Whether a run is, or was, in this folder itself."""
    return os.path.isfile(folder / RECORD) and os.path.lexists(folder / LOCK)


def _is_in_use(folder: Path) -> bool:
    """Whether a run is in progress there: it may have no record yet."""
    seen = folder_lock.look(folder)
    return bool(seen.held and seen.owner)


def _refuse_above_runs(folder: Path) -> None:
    """Raise CannotRun where the folder has runs below it, as that of a sweep has: with a run of its own they would be
    inside that one. The folder of a run may have some that have ended, those of a user who put them there."""
    try:
        sweep = any(os.path.lexists(folder / name) for name in (TABLE, POINTS))
        own = os.path.lexists(folder / RECORD)
        below = (not own and (sweep or any(_below(folder, RECORD)))) or _is_in_use(folder / NEW)
        below = below or any(_is_in_use(lock.parent) for lock in _below(folder, LOCK))
    except (OSError, ValueError):
        return
    if below:
        what = "a sweep" if sweep else "other runs"
        raise CannotRun([Problem("out", str(folder), f"is the folder of {what}", (_other_folder(folder),))])


def _below(folder: Path, name: str) -> Iterator[Path]:
    return (found for depth in range(1, DEEPEST + 1) for found in folder.glob(f"{'[!.]*/' * depth}{name}"))


def _refuse_files_of_others(folder: Path, overwrite: bool) -> None:
    """Raise CannotRun where files have names of ours and no run has made them: a run would remove them.

    With `overwrite` they may go, except for what no run makes: a folder with something in it by the name of a file.
    """
    try:
        there = [name for name in run_files.ALL if _is_something(folder / name)]
        folders = [name for name in there if name not in run_files.FOLDERS and os.path.isdir(folder / name)]
        ours = overwrite or not there or _has_a_run(folder)
    except (OSError, ValueError):
        return
    if folders:
        message = f"has a folder {folders[0]}, where a run has a file"
        raise CannotRun([Problem("out", str(folder), message, (_other_folder(folder),))])
    if not ours:
        message = f"has {_enumerated(there)}, which no run has made and this one would replace"
        fixes = (_other_folder(folder), {"overwrite": True})
        raise CannotRun([Problem("out", str(folder), message, fixes)])


def _is_something(path: Path) -> bool:
    """Whether there is a file, or a folder with something in it."""
    try:
        return any(path.iterdir()) if os.path.isdir(path) else os.path.lexists(path)
    except OSError:  # that cannot be seen
        return True


def _has_a_run(folder: Path) -> bool:
    """Whether a run has been started in a folder. Each makes the lock before any other file; a folder that was copied
    without it has a record, also a damaged one, or a checkpoint that can be used."""
    if os.path.lexists(folder / LOCK):
        return True
    try:
        found = parse(files.read_bytes(folder / RECORD))
    except OSError:
        return checkpoint_files.has_usable(folder)
    except SchemaError:
        return True
    return isinstance(found, dict) and {"id", "status"} <= found.keys()


def _enumerated(names: Sequence[str]) -> str:
    """config.yaml, log and checkpoints."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _other_folder(folder: Path) -> Fix:
    return {"out": f"{folder.resolve()}-2"}


@contextmanager
def in_use(path: Path, title: str) -> Iterator[Lock]:
    """Hold the lock of a run's folder. Raises `CannotRun` where another process has it, and where there can be none."""
    with ExitStack() as stack:
        try:
            lock = stack.enter_context(folder_lock.held(path, folder_lock.PATIENCE_S))
        except Busy as error:
            problem = Problem("out", str(path), f"is in use by {error}", (_other_folder(path),))
            raise CannotRun([problem], title) from None
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
        self.accepted = not any(map(os.path.lexists, _files_of(path)))
        self.resumed: Resumed | None = None

    def start(self) -> None:
        """Start next to an earlier run, or in place."""
        clear_refused(self.path)
        if not self.accepted:
            self.work = self.path / NEW
            self.work.mkdir()

    def resume(self, resumed: Resumed) -> None:
        """From now on this is the next start of the run in the folder."""
        self.resumed = resumed
        self.record = replace(self.record, id=resumed.state.id)

    def accept(self) -> None:
        """Put the new run in the place of the earlier one; or go on with that one, from its checkpoint."""
        if self.accepted or self.work == self.path:
            self.accepted = True
            return
        if self.resumed:
            self._go_back_to(self.resumed)
        else:
            self._clear()
        for file in sorted(self.work.iterdir(), key=lambda file: file.name == RECORD):
            checkpoint_files.remove(self.path / file.name)
            file.replace(self.path / file.name)
        self.work.rmdir()
        self.work, self.accepted = self.path, True

    def _go_back_to(self, resumed: Resumed) -> None:
        """Leave the files of the run as they were at its checkpoint, and without those about how it ended."""
        checkpoint_files.tidy(self.path, resumed.unusable)
        for name in (METRICS, LOG):
            if not (self.path / name).is_file():
                checkpoint_files.remove(self.path / name)
        files.write_text(self.path / METRICS, "".join(f"{line}\n" for line in resumed.state.lines))
        for name in run_files.OF_END:
            checkpoint_files.remove(self.path / name)
        if (self.path / LOG).is_file() and (self.work / LOG).is_file():
            with (self.path / LOG).open("ab") as log:
                log.write((self.work / LOG).read_bytes())
            (self.work / LOG).unlink()

    def update(self, **changes: Any) -> None:
        """Change the record, here and on disk; numbers that are not finite become null."""
        self.record = replace(self.record, **finite(changes))
        self.record.save(self.work / RECORD)

    def finish(self, status: Status, reason: str, problems: tuple[Problem, ...] = ()) -> str:
        """Write how the run ended; returns what the user must know about its files.

        One that was not accepted leaves an earlier run as it is, with its own record next to it.
        """
        self.record = replace(self.record, problems=problems)
        if not self.accepted:
            self.record = replace(self.record, status=status, reason=reason)
            if holds_run(self.path):
                return self._refused()
            self.accept()
        try:
            self.update(status=status, reason=reason)
        except OSError as error:
            failure = Failure.of(error)
            if status == "ok":
                status, reason = failure.status, failure.message
            return self._finish_without_room(status, reason)
        return ""

    def _refused(self) -> str:
        kept = f"the earlier run in {self.path} is kept"
        try:
            self.record.save(self.path / REFUSED)
            if self.record.status != "infeasible" and (self.work / LOG).exists():
                (self.work / LOG).replace(self.path / REFUSED_LOG)
        except OSError as error:
            kept += f"; the record of this one could not be written: {error.strerror}"
        shutil.rmtree(self.path / NEW, ignore_errors=True)
        return kept

    def _finish_without_room(self, status: Status, reason: str) -> str:
        """The status is worth more than copies and pictures, which make room."""
        self.record = replace(self.record, status=status, reason=reason)
        try:
            for name in (*run_files.SPARE, *([TRACE] if self.record.source == "simulated" else [])):
                (self.path / name).unlink(missing_ok=True)
            self.record.save(self.path / RECORD)
        except OSError as error:
            return f"the record could not be written: {error.strerror}: {self.path / RECORD}"
        return ""

    def _clear(self) -> None:
        """Remove the run in the folder; the record last, since it makes the other files a run.

        Checkpoints that are there although nobody asked to overwrite them are of no use to this version: they are kept.
        """
        if self.record.config.get("overwrite"):
            checkpoint_files.remove_all(self.path)
        else:
            checkpoint_files.tidy(self.path, checkpoint_files.steps(self.path))
        for path in sorted(_files_of(self.path), key=lambda path: path.name == RECORD):
            checkpoint_files.remove(path)


def _files_of(folder: Path) -> list[Path]:
    return [folder / name for name in run_files.ALL]


def holds_run(folder: Path) -> bool:
    """Whether there is a run in a folder: any file of one, and more than what a run that never began has left."""
    if not any(map(os.path.lexists, _files_of(folder))):
        return False
    try:
        infeasible = RunRecord.load(folder / RECORD).status == "infeasible"
    except (SchemaError, OSError):
        return True
    return not infeasible or any(os.path.lexists(folder / name) for name in (METRICS, CHECKPOINTS))


def has_trained(folder: Path) -> bool:
    """Whether the run in a folder has done steps that count: it is finished, has trained some, or could be resumed."""
    if trained_steps(folder):
        return True
    try:
        record = RunRecord.load(folder / RECORD)
    except (SchemaError, OSError):
        return checkpoint_files.has_usable(folder)
    return is_finished(record) or bool(checkpoint_files.steps(folder))


def clear_refused(folder: Path) -> None:
    """Remove what starts before have left that were refused or killed."""
    shutil.rmtree(folder / NEW, ignore_errors=True)
    for name in (NEW, REFUSED, REFUSED_LOG):
        checkpoint_files.remove(folder / name)


def save_refused(folder: Path, record: RunRecord) -> None:
    """Leave the record of a run that did not begin: next to an earlier run, or in the place of one."""
    record.save(folder / (REFUSED if holds_run(folder) else RECORD))


def refused_in(folder: Path) -> RunRecord | None:
    """The record of the last start in a folder, if that was refused next to an earlier run."""
    try:
        return RunRecord.load(folder / REFUSED)
    except (SchemaError, OSError):
        return None
