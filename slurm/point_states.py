"""The state of each point of an array: from its record, or from Slurm if it no longer runs.

A job that was killed hard leaves a record that says "running". Once Slurm no longer runs it, and nobody holds the lock
of the point, the record is completed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.core.problem import CannotRun
from harness.core.record import RunRecord, Status
from harness.core.run_files import RECORD
from harness.run import run_folder
from harness.run.folder_lock import Busy, held
from harness.run.stored_record import with_true_status
from harness.sweep import run_point
from harness.sweep.points import Point
from slurm import commands
from slurm.array import Array

MISSING = "missing"
ENDS: dict[str, tuple[Status, str]] = {
    "BOOT_FAIL": ("node_lost", "a node did not come up"),
    "CANCELLED": ("preempted", "its job was cancelled"),
    "COMPLETED": ("error", "its job ended before its record was complete"),
    "DEADLINE": ("timeout", "its job reached its deadline"),
    "FAILED": ("error", "its job failed before its record was complete"),
    "NODE_FAIL": ("node_lost", "a node of its job was lost"),
    "OUT_OF_MEMORY": ("oom", "its job had no memory left: slurm.mem"),
    "PREEMPTED": ("preempted", "its job was preempted"),
    "REVOKED": ("preempted", "its job was revoked"),
    "TIMEOUT": ("timeout", "its job reached its time limit: slurm.time"),
}
"""Final state of a Slurm job -> status of a run that could not write its own."""
UNKNOWN: tuple[Status, str] = ("node_lost", "its job is gone, and Slurm no longer knows how it ended")


@dataclass(frozen=True)
class Queued:
    """An index in Slurm's queue: `job` is the array's id, `reason` why it waits."""

    job: str
    state: str
    reason: str = ""

    @property
    def active(self) -> bool:
        return self.state not in ENDS


@dataclass
class PointState:
    """`state` is the status of `record`, or what Slurm has it doing, or `MISSING`; `log` is the batch step's."""

    index: int
    point: Point
    state: str
    reason: str = ""
    record: RunRecord | None = field(default=None, repr=False)
    log: Path | None = None


def active(array: Array) -> dict[int, str]:
    """The state of each index that waits or runs. Raises CannotRun without Slurm."""
    return {index: queued.state for index, queued in _queue(array).items() if queued.active}


def survey(array: Array) -> tuple[list[PointState], str]:
    """Every point, by index; and why Slurm could not be asked, if so: then records alone count."""
    try:
        queue, unasked = _queue(array), ""
    except CannotRun as error:
        queue, unasked = None, error.problems[0].message
    jobs = {index: job.job for job in array.jobs() for index in job.indices}
    states = []
    for index, point in enumerate(array.points()):
        state = _state(array, index, point, queue)
        if (job := jobs.get(index)) and (log := array.log(job, index)).exists():
            state.log = log
        states.append(state)
    return states, unasked


def _queue(array: Array) -> dict[int, Queued]:
    """The jobs of this folder that Slurm knows: all that wait or run, and those that ended some minutes ago."""
    order = [job.job for job in array.jobs()]
    queued: dict[int, Queued] = {}
    if not order:
        return queued
    for line in commands.ask(["squeue", "-h", "-r", "-t", "all", "--me", "-o", "%F|%K|%T|%r"]).splitlines():
        job, index, state, reason = line.split("|", 3)
        if job in order and index.isdigit():
            former = queued.get(int(index))
            if former is None or order.index(job) >= order.index(former.job):
                queued[int(index)] = Queued(job, state, reason)
    return queued


def _state(array: Array, index: int, point: Point, queue: dict[int, Queued] | None) -> PointState:
    record = run_point.stored(array.run(point))
    known = queue.get(index) if queue else None
    if record is not None and record.status == "ok":
        return PointState(index, point, "ok", record=record)
    record = run_folder.refused_in(array.run(point)) or record
    if known and known.active:
        reason = "" if known.reason == "None" else known.reason
        return PointState(index, point, known.state.lower(), reason)
    if record is None:
        why = f"{ENDS[known.state][1]} (job {known.job}_{index})" if known else "never ran"
        if run_point.unreadable(array.run(point)):
            why = f"its {RECORD} cannot be read"
        return PointState(index, point, MISSING, why)
    if record.status == "running":
        folder = array.run(point)
        record = with_true_status(record, folder) if queue is None else _ended(array, index, point, known)
    return PointState(index, point, record.status, record.reason, record)


def _ended(array: Array, index: int, point: Point, known: Queued | None) -> RunRecord:
    """The record of a run that Slurm no longer has, completed; as it is where someone else is running the point."""
    folder = array.run(point)
    status, what = ENDS[known.state] if known else UNKNOWN
    reason = f"{what} (job {known.job}_{index}, {known.state})" if known else what
    record = run_point.stored(folder)
    assert record
    try:
        with held(folder):
            return run_point.finish(run_point.stored(folder) or record, folder, status, reason)
    except Busy:
        return record


def chosen(points: Sequence[PointState], states: Sequence[str]) -> list[int]:
    """The indices of the points in one of these states."""
    return [one.index for one in points if one.state in states]
