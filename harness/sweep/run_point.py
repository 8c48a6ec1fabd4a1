"""Runs one point of a sweep, here or in a process of its own, and sees to it that it has a record.

Local sweeps and Slurm's tasks share this: a point that is ok is not run again, one that cannot run is reported before
anything starts, and one that another process is running is left to it (`folder_lock.Busy`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from omegaconf import DictConfig, OmegaConf

from harness.checks import configuration
from harness.cli.compose import compose
from harness.config import registry
from harness.config.overrides import quoted, title
from harness.core import files
from harness.core.problem import CannotRun
from harness.core.record import RunRecord, Status
from harness.core.run_files import CONSOLE, RECORD
from harness.core.serialization import SchemaError, finite
from harness.launch import die_with_parent, fork_server
from harness.launch.child_wait import LOOK_S, ends_within
from harness.launch.fork_server import ForkedWorker
from harness.launch.signals import Preempted
from harness.run import folder_lock, run_folder, runner, stored_record
from harness.run.folder_lock import Lock, held
from harness.sweep.points import Point
from harness.sweep.row import Row

GRACE_S = 20.0
"""Between asking a run to end and killing it, in addition to its launch.grace_s: for its record and its tracker."""
CONSOLE_BYTES = 32 << 20


def done_before(row: Row, folder: Path) -> bool:
    """Whether an earlier start has finished the point; then the row has its record."""
    earlier = stored(folder)
    row.before = earlier is not None and earlier.status == "ok"
    if row.before:
        row.record = earlier
    return row.before


def composed(point: Point, expected: configuration.Expected | None = None) -> DictConfig | RunRecord:
    """The configuration of a point; of one that cannot run, as far as that is known without torch, its record.

    `expected` returns the job in which a configuration will run; None: it runs here.
    """
    try:
        config = compose(point.overrides, expected)
    except CannotRun as error:
        return replace(_begun(point, "infeasible", str(error)), problems=error.problems)
    problems = configuration.request_problems(config, point.overrides, expected)
    if not problems:
        return config
    container: Any = OmegaConf.to_container(config, resolve=True)
    refused = CannotRun(problems, title(config, point.overrides))
    source: Any = "measured" if config.mode == "run" else "simulated"
    begun = replace(_begun(point, "infeasible", str(refused)), problems=refused.problems)
    return replace(begun, source=source, config=finite(container))


def refuse(row: Row, folder: Path, record: RunRecord) -> None:
    """Give a point that cannot run its record, unless another sweep is running it."""
    row.began_s = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    with held(folder):
        if not done_before(row, folder):
            run_folder.clear_refused(folder)
            row.record = record
            run_folder.save_refused(folder, record)


def run_point(
    row: Row,
    folder: Path,
    config: DictConfig | None = None,
    waiting: Callable[[], None] = lambda: None,
    here: bool | None = None,
    environment: Mapping[str, str] = {},
    watch: Callable[[str], None] | None = None,
    server: str = "",
    among: str = "sweep",
) -> None:
    """Fill in the row's record: from `folder` where the point is done already, by running it otherwise.

    `config` is the point's, if it is composed already. `here`: in this process, as by default points are that only
    plan or simulate, and call `watch` with what they are doing; a process of its own has the variables of
    `environment`, too.
    Raises `folder_lock.Busy`, and KeyboardInterrupt, with the record filled in, if the run was ended from outside.
    """
    if done_before(row, folder):
        return
    folder.mkdir(parents=True, exist_ok=True)
    with held(folder) as lock:
        row.began_s = time.monotonic()
        if not done_before(row, folder):
            waiting()
            _run(row, folder, config, waiting, here, lock, environment, watch, server, among)


def _run(
    row: Row,
    folder: Path,
    config: DictConfig | None,
    waiting: Callable[[], None],
    here: bool | None,
    lock: Lock,
    environment: Mapping[str, str],
    watch: Callable[[str], None] | None,
    server: str,
    among: str,
) -> None:
    run_folder.clear_refused(folder)
    earlier = stored(folder)
    try:
        config = compose(row.point.overrides) if config is None else config
    except CannotRun as error:
        row.record = replace(_begun(row.point, "infeasible", str(error)), problems=error.problems)
        run_folder.save_refused(folder, row.record)
        return
    overrides = [*row.point.overrides, quoted("out", str(folder))]
    try:
        if config.mode != "run" if here is None else here:
            config.out = str(folder)
            why = _here(config, overrides, folder / CONSOLE, watch)
        else:
            code = _execute(overrides, folder / CONSOLE, waiting, lock, environment, config.launch.grace_s, server)
            why = _why(code, folder)
    except KeyboardInterrupt:
        row.record = _ended(earlier, row.point, folder, "preempted", f"ended with its {among}")
        raise
    row.record = _ended(earlier, row.point, folder, "error", why)


def _here(config: DictConfig, overrides: Sequence[str], console: Path, watch: Callable[[str], None] | None) -> str:
    """Run a point in this process; what it prints goes to `console`. Returns why its record may not be complete."""
    with (
        console.open("w", encoding="utf-8", errors="backslashreplace") as output,
        redirect_stdout(output),
        redirect_stderr(output),
    ):
        try:
            record = runner.run(config, overrides, watch)
        except Exception as error:
            traceback.print_exc()
            return f"{type(error).__name__}: {error}"
    if record.status == "preempted":
        raise KeyboardInterrupt(record.reason)  # the run has caught it, and ended in order
    return "ended before its record was complete"


def _execute(
    overrides: Sequence[str],
    console: Path,
    waiting: Callable[[], None],
    lock: Lock,
    environment: Mapping[str, str],
    grace_s: float,
    server: str,
) -> int:
    """`python run.py OVERRIDES`, without a shell; its exit code, negative for a signal. Leaves no process after.

    It inherits the lock: if this process is killed, no other sweep begins before the run has ended.
    """
    console.unlink(missing_ok=True)
    with console.open("ab") as output:
        process = _started(overrides, output, console.parent.name, lock, os.environ | environment, server)
        number: int = signal.SIGINT
        try:
            while process.poll() is None:
                waiting()
                files.cut_in_half(console, CONSOLE_BYTES)
                ends_within(process, LOOK_S)
        except Preempted as error:
            number = error.number
            raise
        finally:
            _end(process, grace_s, number)
    assert process.returncode is not None
    return process.returncode


def command(overrides: Sequence[str]) -> list[str]:
    """The command of a point, for Python."""
    return [str(registry.ROOT / "run.py"), *overrides]


def _started(
    overrides: Sequence[str], output: IO[bytes], point: str, lock: Lock, environment: Mapping[str, str], server: str
) -> subprocess.Popen[bytes] | ForkedWorker:
    """The process of a point, in a session of its own: Ctrl-C reaches the sweep alone, which hands it on."""
    inherits = folder_lock.handed_on(lock)
    if server and (worker := fork_server.ask(server, [point, *overrides], output, environment, inherits)):
        return worker
    return subprocess.Popen(
        [*die_with_parent.prefix(), sys.executable, *command(overrides)],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        pass_fds=[*inherits.values()],
        env={**environment, **{name: str(descriptor) for name, descriptor in inherits.items()}},
    )


def _end(process: subprocess.Popen[bytes] | ForkedWorker, grace_s: float, number: int) -> None:
    """Hand on the signal that has ended the sweep, so that the run's record names it."""
    if process.poll() is None:
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S + grace_s)
    if isinstance(process, subprocess.Popen) or process.poll() is None:  # the group of a forked one ends with it
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def stored(folder: Path) -> RunRecord | None:
    """The record in a run's folder; None where there is none, or none that tables can show."""
    try:
        return stored_record.read(folder)
    except (OSError, SchemaError):
        return None


def unreadable(folder: Path) -> bool:
    """Whether a run's folder has a record that nobody can read; the point is run again."""
    return stored(folder) is None and (folder / RECORD).exists()


def _ended(earlier: RunRecord | None, point: Point, folder: Path, status: Status, reason: str) -> RunRecord:
    """The record of a start that has ended, after an `earlier` one; if it could not finish it, that is done here.

    A start that was refused, or has not come so far as to begin, leaves an earlier run as it is.
    """
    if refused := run_folder.refused_in(folder):
        return refused
    record = stored(folder)
    if record is not None and record != earlier:
        return finish(record, folder, status, reason)
    begun = _begun(point, status, reason)
    run_folder.save_refused(folder, begun)
    return begun


def finish(record: RunRecord, folder: Path, status: Status, reason: str) -> RunRecord:
    """The record of a run that has ended; if the run could not finish it, that is done here."""
    if record.status != "running":
        return record
    record = replace(record, status=status, reason=reason)
    record.save(folder / RECORD)
    return record


def _begun(point: Point, status: Status, reason: str) -> RunRecord:
    return RunRecord(point.id, status, reason=reason, manifest={"overrides": list(point.overrides)})


def _why(code: int, folder: Path) -> str:
    ended = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    lines = (folder / CONSOLE).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"{ended} before its record was complete: {lines[-1] if lines else 'it printed nothing'}"
