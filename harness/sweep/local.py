"""Runs the points of a sweep on this machine: one after the other, but for searches that measure nothing (`at_once`).

Points that train have a process of their own; those that only plan or simulate share this one. A point that fails is a
row and not the end; one that cannot run is reported before anything starts. A sweep that is started again (the same
+sweeps=NAME and scale, or the same out=DIR) skips the points that have ended well. Two on the same folder share them.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console

from harness.core import files
from harness.core.problem import CannotRun, Fix, Problem
from harness.core.record import EXIT_CODES, RunRecord
from harness.core.run_files import RECORD, TABLE
from harness.host import devices
from harness.launch import fork_server, supervisor
from harness.launch.child_wait import LOOK_S
from harness.launch.signals import preemptible
from harness.run import folder_lock, run_folder
from harness.run.folder_lock import Busy, held
from harness.sweep import at_once, equal_micro_batches, run_point
from harness.sweep.closing import close
from harness.sweep.live_table import Display
from harness.sweep.points import expand, refuse_mistyped, refuse_one_file, scale_of, value_of
from harness.sweep.row import Row
from harness.sweep.table import as_csv
from harness.user_model import sources


def main(overrides: Sequence[str]) -> int:
    """`python run.py -m ...`: run every point, print the closing table and keep it as points.csv.

    Returns 0 if every point has a result: it is ok, or was only simulated or planned and is infeasible. Else 1, and 130
    if the sweep was interrupted. Raises CannotRun if all points have the same typing error, or cannot be read, or the
    sweep's folder cannot be written.
    """
    return run_to_end(rows_of(overrides), folder_of(overrides))


def run_to_end(rows: Sequence[Row], folder: Path) -> int:
    """Run the points of a sweep; returns the exit code of `main`."""
    interrupted = not run_all(rows, folder)
    return EXIT_CODES["preempted"] if interrupted else 0 if all(_has_result(row) for row in rows) else 1


def rows_of(overrides: Sequence[str]) -> list[Row]:
    """The points of a sweep, none of which has run. Raises CannotRun if all points have the same typing error, or
    cannot be read."""
    points = expand(overrides)
    refuse_mistyped(points)
    refuse_one_file(points)
    return [Row(point) for point in equal_micro_batches.equalized(points, overrides)]


def run_all(rows: Sequence[Row], folder: Path, console: Console | None = None) -> bool:
    """Fill in the records of all points, and `show` them; returns False if the sweep was interrupted.

    Raises CannotRun if the folder cannot be written. What is printed goes to the console: by default to stdout.
    """
    make(folder)
    whole = True
    with writing(folder):
        try:
            with preemptible(), fork_server.scope(), Display(rows, console) as display:
                _go_through(rows, folder, display)
        except KeyboardInterrupt:
            whole = False
    show(rows, folder, console)
    return whole


def show(rows: Sequence[Row], folder: Path, console: Console | None = None) -> None:
    """Print the closing table and keep it as points.csv; raises CannotRun if it cannot be written."""
    close(rows, folder, console)
    with writing(folder):
        files.write_text(folder / TABLE, as_csv(rows))


def _go_through(rows: Sequence[Row], folder: Path, display: Display) -> None:
    """First those that cannot run, then all others, at last what another sweep was running meanwhile."""
    configs: dict[str, DictConfig | None] = {}
    for row in rows:
        if run_point.unreadable(folder / row.point.id):
            display.note(f"{row.point.id} has a {RECORD} that cannot be read, it is run again")
        configs[row.point.id] = _composed(row, folder / row.point.id)
        if row.record:
            display.ended(row)
        if row.record and row.before and sources.changed(row.record.config.get("model", {})):
            model = row.record.config["model"]["name"]
            display.note(f"{row.point.id} was run before {model} was changed, and is kept: out=DIR for new runs")
    if sum(config is not None and config.mode == "run" for config in configs.values()) > 1:
        supervisor.start_fork_server()
    together = [row for row in rows if row.record is None and at_once.able(configs[row.point.id])]
    several = len(together) > 1 and devices.cores() > 1
    elsewhere = at_once.run(together, folder, configs, display) if several else []
    for row in rows:
        if row.record is None and row not in [one for one, _ in elsewhere]:
            try:
                watch = functools.partial(display.doing, row)
                config = configs.pop(row.point.id)
                run_point.run_point(row, folder / row.point.id, config, display.refresh, watch=watch)
                display.ended(row)
            except Busy:
                row.waits = "elsewhere"
                elsewhere.append((row, run_point.stored(folder / row.point.id)))
    for row, former in elsewhere:
        _wait_for(row, folder / row.point.id, former, display)
        display.ended(row)


def _composed(row: Row, folder: Path) -> DictConfig | None:
    """The configuration of a point that is to run; the record of one that is done already, or cannot run."""
    if run_point.done_before(row, folder):
        return None
    found = run_point.composed(row.point)
    if not isinstance(found, RunRecord):
        return found
    with contextlib.suppress(Busy):
        run_point.refuse(row, folder, found)
    return None


def _wait_for(row: Row, folder: Path, former: RunRecord | None, display: Display) -> None:
    """The record that another sweep makes; one that ends without, or was interrupted, leaves the point to this one."""
    while row.record is None:
        try:
            with held(folder):
                found = run_point.stored(folder)
            if found != former and found and found.status not in ("running", "preempted"):
                row.record = found
            else:
                run_point.run_point(row, folder, waiting=display.refresh)
        except Busy:
            display.refresh()
            time.sleep(LOOK_S)


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Says of what cannot be written that it is the sweep's folder."""
    try:
        yield
    except OSError as error:
        problem = Problem("out", str(folder), f"cannot be written: {error}", hint="out=DIR")
        raise CannotRun([problem], "this sweep") from error


def _has_result(row: Row) -> bool:
    """Return whether a point has a result: "does not fit" is one, "could not be measured" is a failure."""
    record = row.record
    return record is not None and (
        record.status == "ok" or (record.status == "infeasible" and record.source == "simulated")
    )


def folder_of(overrides: Sequence[str]) -> Path:
    """The sweep's folder: out=DIR, or runs/NAME or runs/NAME-SCALE of its file, or runs/DATE."""
    name = value_of(overrides, "+sweeps") or datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    scale = scale_of(overrides)
    return Path(value_of(overrides, "out") or Path("runs") / (f"{name}-{scale}" if scale else name))


def make(folder: Path) -> None:
    """Make the sweep's folder, if it is not there. Raises CannotRun, also for the folder of a run, in progress or not:
    its points would be inside that. Its name ends in no blanks."""
    run_folder.refuse_no_place(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = Problem("out", str(folder), f"cannot be made a folder: {error.strerror}", hint="out=DIR")
        raise CannotRun([problem], "this sweep") from error
    seen = folder_lock.look(folder)
    if seen.held or run_folder.is_started(folder):
        other: Fix = {"out": f"{folder}-2"}
        message = f"is in use by {seen.owner}, a run" if seen.held else "is the folder of a run"
        raise CannotRun([Problem("out", str(folder), message, (other,))], "this sweep")
