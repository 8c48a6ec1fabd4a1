"""The worker process of a run: its parent starts, watches and ends it. Every wait has an end.

    run_worker("profile", "2")        the parent never imports torch, a worker does (`harness.worker`)
      `- supervise(command)           start, watch the log and metrics.jsonl, end; with srun, start again

The parent learns how the worker did from its files in the run's folder and from its exit code.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from harness.core import files
from harness.core.problem import CannotRun, Problem
from harness.core.record import Status
from harness.core.run_files import LOG, MACHINE, METRICS
from harness.host import machine, malloc
from harness.host.machine import Machine
from harness.launch import die_with_parent
from harness.launch.failure import ExitReasons
from harness.launch.slurm_step import Step

ROOT = Path(__file__).resolve().parents[2]
LOG_BYTES = 256 << 20
"""A worker that prints without end does not fill the disk."""
WATCHED = (LOG, METRICS)
"""The files that change while the worker makes progress."""
POLL_S = 0.05
DUMP_S = 1.0
"""How long a worker that hangs may write its Python stacks."""
FORKABLE = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""With it torch asks for GPUs without starting CUDA, which no process that is forked later could use."""
GRACE_S = 3.0
"""Between asking a worker to end and killing it."""


@dataclass(frozen=True)
class Outcome:
    """How a worker or a run ended; `reason` is for the user."""

    status: Status
    reason: str = ""
    problems: tuple[Problem, ...] = ()


class WorkerFailed(Exception):
    """A worker did not end well; carries the `Outcome`."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        super().__init__(outcome.reason)


def run_worker(
    folder: Path,
    title: str,
    timeout_s: float,
    *action: str,
    follow: Callable[[], None] = lambda: None,
    step: Step | None = None,
    inherits: Mapping[str, int] | None = None,
) -> None:
    """Have a worker do an action ("profile", "2") for the run in `folder`, to its end.

    With a `step` there are many workers, the ranks of a Slurm step. `follow` is called all the time meanwhile. The
    worker `inherits` file descriptors, each by the environment variable that says its number. Raises
    `CannotRun` for problems that only a worker could find, `WorkerFailed` for every other end that is not good.
    """
    # -P: a module in the user's folder does not hide one of this project
    command = [sys.executable, "-P", "-m", "harness.worker", str(folder.resolve()), *action]
    with step.cleaning_up(folder) if step else nullcontext():
        if step:
            command = [*step.command(), *command, step.token]
        outcome = supervise(command, folder, timeout_s, follow, step, inherits)
    if outcome.problems:
        raise CannotRun(outcome.problems, title)
    if outcome.status != "ok":
        raise WorkerFailed(outcome)


def measure_machine(folder: Path, title: str, timeout_s: float, kind: str) -> Machine:
    """What this machine's devices of a `kind` can do, measured now and kept for later runs; raises as `run_worker`."""
    run_worker(folder, title, timeout_s, "machine", kind)
    measured = Machine.load(folder / MACHINE)
    (folder / MACHINE).unlink()
    machine.store(measured)
    return measured


def supervise(
    command: Sequence[str],
    run_dir: Path,
    timeout_s: float,
    follow: Callable[[], None] = lambda: None,
    step: Step | None = None,
    inherits: Mapping[str, int] | None = None,
) -> Outcome:
    """Run a process until it has ended or makes no progress; it and all that it started are continued return.

    Its output goes to `run_dir/log`; `follow` is called all the time meanwhile. Progress is a change of the `WATCHED`
    files. A worker that made none for `timeout_s` gets SIGUSR2 (it writes its Python stacks) and is killed. If this
    process dies, the kernel kills the worker. With a `step` the command is srun's, and its ranks are on the nodes of
    the job. It `inherits` descriptors as `run_worker` says.
    """
    given = inherits or {}
    reasons = ExitReasons(run_dir / LOG, step)
    with (run_dir / LOG).open("ab") as log:
        while True:
            # a process group of its own: Ctrl-C reaches the parent alone, and all that the worker starts ends with it
            worker = subprocess.Popen(
                [*die_with_parent.prefix(), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment() | {name: str(descriptor) for name, descriptor in given.items()},
                pass_fds=tuple(given.values()),
                start_new_session=True,
            )
            try:
                outcome = _watch(worker, run_dir, timeout_s, follow, reasons)
            finally:
                _end(worker)
            if outcome.status in ("ok", "timeout") or not reasons.try_again():
                break
    follow()
    return outcome


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    settings = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **FORKABLE}
    return os.environ | malloc.environment() | settings


def _watch(
    worker: subprocess.Popen[bytes], run_dir: Path, timeout_s: float, follow: Callable[[], None], reasons: ExitReasons
) -> Outcome:
    seen, since = _progress(run_dir), time.monotonic()
    while (code := worker.poll()) is None:
        files.cut_in_half(run_dir / LOG, LOG_BYTES)
        now = _progress(run_dir)
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > timeout_s:
            _signal_group(worker, signal.SIGUSR2)
            time.sleep(DUMP_S)
            reason = f"no progress for launch.timeout_s={timeout_s:g} s; each rank's Python stack is in the log"
            return Outcome("timeout", reason)
        follow()
        time.sleep(POLL_S)
    if code == 0:
        return Outcome("ok")
    failure = reasons.explain(code)
    return Outcome(failure.status, failure.message, failure.problems)


def _progress(run_dir: Path) -> list[tuple[int, int]]:
    """Sizes and times of the watched files."""
    state = []
    for name in WATCHED:
        with suppress(FileNotFoundError):
            found = (run_dir / name).stat()
            state.append((found.st_size, found.st_mtime_ns))
    return state


def _end(worker: subprocess.Popen[bytes]) -> None:
    """End the worker, and all that it has started."""
    _signal_group(worker, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        worker.wait(GRACE_S)
    _signal_group(worker, signal.SIGKILL)
    worker.wait()


def _signal_group(worker: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.pid, number)
