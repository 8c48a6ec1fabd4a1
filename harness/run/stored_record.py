"""The record in a run's folder as a reader must see it: one that says "running" is running only while the folder's lock
is held.

    held                                   running
    free, and taken last on this host      lost       its process has ended without a word
    free, and taken last on another host   unknown    this host need not see a lock of that one

Both are what a reader finds; no run writes them.
"""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

from harness.config import record_shape
from harness.core.record import RunRecord
from harness.core.run_files import CONSOLE, POINTS, RECORD
from harness.run import checkpoint_files, folder_lock
from harness.run.checkpoint_files import after_steps


def load(folder: Path) -> RunRecord:
    """The record in a folder, with a true status. Raises as `read` does."""
    return with_true_status(read(folder), folder)


def read(folder: Path) -> RunRecord:
    """The record in a folder as it is. Raises OSError, and SchemaError also for fields that have other types than
    tables expect."""
    record = RunRecord.load(folder / RECORD)
    record_shape.check_types(record)
    return record


def with_true_status(record: RunRecord, folder: Path) -> RunRecord:
    """A record that was read in `folder`; of one that says "running" the lock decides."""
    if record.status != "running":
        return record
    seen = folder_lock.look(folder)
    if seen.held:
        return record
    host = seen.owner.host if seen.owner else record.manifest.get("host")
    who = str(seen.owner or f"a process on {host or 'an unknown host'}")
    if seen.held is None or host != socket.gethostname():
        return replace(record, status="unknown", reason=f"{who} was running it, whose lock cannot be seen from here")
    return replace(record, status="lost", reason=f"{who} was running it and is gone; {_how_to_resume(folder)}")


def _how_to_resume(folder: Path) -> str:
    steps = checkpoint_files.steps(folder)
    where = f"resumes {after_steps(steps[0])}" if steps else "begins again: there is no checkpoint"
    if (folder.parent / POINTS).exists():
        return f"submitted again by python -m slurm.status {folder.parent} --only lost it {where}"
    if (folder / CONSOLE).exists():
        again = f"a sweep or a search that is started again with the same command and out={folder.parent}"
        return f"it {where} by {again}; a race is run again in another folder"
    return f"started again with the same command and out={folder} it {where}"
