"""Runs the points of a sweep one after the other on this machine.

Points that train have a process of their own; those that only plan or simulate share this one. A point that fails is a
row and not the end. A sweep that is started again (the same +sweeps=NAME and scale, or the same out=DIR) skips the
points that have ended well.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from omegaconf import DictConfig

from harness import files, registry, runner
from harness.compose import compose
from harness.launch import preemptible
from harness.overrides import quoted
from harness.problem import CannotRun, Problem
from harness.record import EXIT_CODES, RunRecord, Status
from harness.serial import SchemaError
from harness.sweep_points import Point, expand, scale_of, value_of
from harness.sweep_table import Display, Row, as_csv, close

POLL_S = 0.1
GRACE_S = 20.0
"""Between asking a run to end and killing it: its ranks get a few seconds, its record and tracker the rest."""
CONSOLE = "console"
"""The file in a run's folder that holds what the run printed."""
RECORD = "record.json"
POINTS = "points.csv"
"""The file in a sweep's folder that holds its table."""


def main(overrides: Sequence[str]) -> int:
    """`python run.py -m ...`: run every point, print the closing table and keep it as `POINTS`.

    Returns 0 if every point has a result: it is ok, or was only simulated or planned and is infeasible. Else 1, and 130
    if the sweep was interrupted. Raises CannotRun if no point can be read, or the sweep's folder cannot be written.
    """
    rows = [Row(point) for point in expand(overrides)]
    folder = _folder(overrides)
    interrupted = False
    with _writing(folder):
        try:
            with preemptible(), Display(rows) as display:
                for row in rows:
                    run_point(row, folder / row.point.id, display.refresh)
                    display.ended(row)
        except KeyboardInterrupt:
            interrupted = True
    close(rows, folder)
    with _writing(folder):
        files.write_text(folder / POINTS, as_csv(rows))
    return EXIT_CODES["preempted"] if interrupted else 0 if all(_has_result(row) for row in rows) else 1


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Says of what cannot be written that it is the sweep's folder."""
    try:
        yield
    except OSError as error:
        raise CannotRun([Problem(f"out {folder}", f"cannot be written: {error}", "out=DIR")], "this sweep") from error


def _has_result(row: Row) -> bool:
    """That a simulated or planned point does not fit is a result; that a point could not be measured is a failure."""
    record = row.record
    return record is not None and (
        record.status == "ok" or (record.status == "infeasible" and record.source == "simulated")
    )


def run_point(row: Row, folder: Path, waiting: Callable[[], None] = lambda: None) -> None:
    """Fill in the row's record: from `folder` where the point is done already, by running it otherwise."""
    row.began_s = time.monotonic()
    earlier = _stored(folder)
    row.before = earlier is not None and earlier.status == "ok"
    if row.before:
        row.record = earlier
        return
    waiting()
    try:
        config = compose(row.point.overrides)
    except CannotRun as error:
        row.record = _finish(None, row.point, folder, "infeasible", str(error))
        return
    folder.mkdir(parents=True, exist_ok=True)
    overrides = [*row.point.overrides, quoted("out", str(folder))]
    try:
        if config.mode == "run":
            why = _why(_execute(overrides, folder / CONSOLE, waiting), folder)
        else:
            config.out = str(folder)
            why = _here(config, overrides, folder / CONSOLE)
    except KeyboardInterrupt:
        row.record = _finish(_newer(folder, earlier), row.point, folder, "preempted", "ended with its sweep")
        raise
    row.record = _finish(_newer(folder, earlier), row.point, folder, "error", why)


def _here(config: DictConfig, overrides: Sequence[str], console: Path) -> str:
    """Run a point in this process; what it prints goes to `console`. Returns why its record may not be complete."""
    with console.open("w", encoding="utf-8") as output, redirect_stdout(output), redirect_stderr(output):
        try:
            record = runner.run(config, overrides)
        except Exception as error:
            traceback.print_exc()
            return f"{type(error).__name__}: {error}"
    if record.status == "preempted":
        raise KeyboardInterrupt(record.reason)  # the run has caught it, and ended in order
    return "ended before its record was complete"


def _execute(overrides: Sequence[str], console: Path, waiting: Callable[[], None]) -> int:
    """`python run.py OVERRIDES`, without a shell; its exit code, negative for a signal. Leaves no process behind."""
    orphan = [sys.executable, "-S", "-E", str(registry.ROOT / "harness" / "orphan.py"), str(os.getpid())]
    command = [*orphan, sys.executable, str(registry.ROOT / "run.py"), *overrides]
    with console.open("wb") as output:
        # in a session of its own: Ctrl-C reaches the sweep alone, which hands it on
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while process.poll() is None:
                waiting()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_S)
        finally:
            _end(process)
    return process.returncode


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _stored(folder: Path) -> RunRecord | None:
    """The record in a run's folder; None where there is none, or none of this schema."""
    try:
        return RunRecord.load(folder / RECORD)
    except (FileNotFoundError, SchemaError, UnicodeDecodeError):
        return None


def _newer(folder: Path, earlier: RunRecord | None) -> RunRecord | None:
    """The record, if it is not that of an earlier start."""
    record = _stored(folder)
    return None if record == earlier else record


def _finish(record: RunRecord | None, point: Point, folder: Path, status: Status, reason: str) -> RunRecord:
    """The record of a run that has ended; if the run could not finish it, that is done here."""
    if record is not None and record.status != "running":
        return record
    begun = record or RunRecord(point.id, "running", manifest={"overrides": list(point.overrides)})
    record = replace(begun, status=status, reason=reason)
    record.save(folder / RECORD)
    return record


def _why(code: int, folder: Path) -> str:
    ended = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    lines = (folder / CONSOLE).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"{ended} before its record was complete: {lines[-1] if lines else 'it printed nothing'}"


def _folder(overrides: Sequence[str]) -> Path:
    """The sweep's folder: out=DIR, or runs/NAME or runs/NAME-SCALE of its file, or runs/DATE."""
    name = value_of(overrides, "+sweeps") or datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    scale = scale_of(overrides)
    folder = Path(value_of(overrides, "out") or Path("runs") / (f"{name}-{scale}" if scale else name))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = Problem(f"out {folder}", f"cannot be made a folder: {error.strerror}", "out=DIR")
        raise CannotRun([problem], "this sweep") from error
    return folder
