"""`python -m slurm.task FOLDER INDEX` runs the point of one index of the array, as its parent process.

The exit code is that of the run, so a point that failed is FAILED for Slurm, too. A point that was stopped for its time
limit, and has made a new checkpoint, is requeued; a preempted one Slurm requeues itself, a cancelled one stays.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from harness.core.problem import CannotRun, Problem
from harness.core.record import EXIT_CODES, RunRecord
from harness.host import command
from harness.launch.signals import preemptible
from harness.run.folder_lock import Busy
from harness.sweep import local, run_point
from harness.sweep.row import Row
from slurm import commands
from slurm.array import Array

LOCK_S = 120.0
"""Seconds that the run of a lost node may hold its lock: file servers free those of a dead client after a while."""


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code of the point's run."""
    parser = argparse.ArgumentParser("python -m slurm.task", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="of python -m slurm.submit")
    parser.add_argument("index", metavar="INDEX", type=int, help="of the point in the array")
    asked = parser.parse_args(arguments)
    folder, index = asked.folder, asked.index
    try:
        array = Array(folder)
        with local.writing(folder):
            return run(array, index)
    except CannotRun as error:
        print(error, file=sys.stderr)
        return EXIT_CODES["infeasible"]


def run(array: Array, index: int) -> int:
    """Run the point of this index to its end, with any status."""
    points = array.points()
    if index >= len(points):
        message = f"is no point, {array.folder} has {len(points)}"
        raise CannotRun([Problem("index", index, message, hint="python -m slurm.status")], "this task")
    row = Row(points[index])
    folder = array.run(row.point)
    before = _checkpoints(folder)
    with contextlib.suppress(KeyboardInterrupt), preemptible():
        _run(row, folder)
    record = row.record
    if record is None:  # ended from outside before the run could begin
        print(f"{row.point.id} stopped before it began", flush=True)
        return EXIT_CODES["preempted"]
    print(f"{row.point.id} {record.status} {record.reason}".rstrip(), flush=True)
    if record.status == "preempted":
        _requeue(record, before, folder)
    return EXIT_CODES[record.status]


def _run(row: Row, folder: Path) -> None:
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            return run_point.run_point(row, folder, here=True)
        except Busy as error:
            if time.monotonic() > deadline:
                raise CannotRun([Problem("point", row.point.id, f"is run by {error} already")], "this task") from error
            time.sleep(1)


def _requeue(record: RunRecord, before: set[str], folder: Path) -> None:
    """Have Slurm start this job again, if it still runs for Slurm and would not do the same once more."""
    job = _job()
    try:
        if job is None or _job_state(job) != "RUNNING":
            return  # cancelled, or Slurm requeues it anyway
        if _checkpoints(folder) <= before:
            print("not requeued: it made no checkpoint in this time -> slurm.time=", flush=True)
            return
        commands.ask(["scontrol", "requeue", job])
    except CannotRun as error:
        print(error, file=sys.stderr)


def _job() -> str | None:
    """12_3: index 3 of array 12. SLURM_JOB_ID is not enough: the last index of an array has the array's own id."""
    array, index = (os.environ.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
    return f"{array}_{index}" if array and index else None


def _job_state(job: str) -> str:
    return commands.ask(["squeue", "-h", "-t", "all", "-j", job, "-o", "%T"]).strip()


def _checkpoints(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").glob("step-*.pt")}


if __name__ == "__main__":
    command.keep_code()
    sys.exit(main(sys.argv[1:]))
