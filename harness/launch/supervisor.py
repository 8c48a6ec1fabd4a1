"""The worker process of a run: its parent starts, watches and ends it. Every wait has an end.

    run_worker("profile", "2")        the parent never imports torch, a worker does (`harness.worker`)
      `- supervise(command)           start, watch the log and metrics.jsonl, end; with srun, start again

The parent learns how the worker did from its files in the run's folder and from its exit code.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

from harness.core import files
from harness.core.problem import CannotRun, Problem
from harness.core.record import Status
from harness.core.run_files import (
    CHECKPOINTS,
    ENGINE_COSTS,
    ERROR,
    LOG,
    MACHINE,
    METRICS,
    PROFILE,
    RESULT,
    STOP,
    TIMINGS,
)
from harness.host import machine, malloc
from harness.host.devices import CUDA_ORDER
from harness.host.machine import Machine
from harness.launch import die_with_parent, fork_server, hang, mpi
from harness.launch.child_wait import LOOK_S, ends_within
from harness.launch.failure import ExitReasons
from harness.launch.fork_server import ForkedWorker
from harness.launch.rank_names import NO_RANKS, RankNames
from harness.launch.rank_step import RankStep
from harness.launch.signals import blocked

ROOT = Path(__file__).resolve().parents[2]
LOG_BYTES = 256 << 20
"""A worker that prints without end does not fill the disk."""
WATCHED = (LOG, METRICS, CHECKPOINTS)
"""The files, and the folder of files, that change while the worker makes progress."""
RESULTS = {
    "train": (RESULT, STOP),
    "profile": (PROFILE,),
    "count": (PROFILE,),
    "machine": (MACHINE,),
    "engine": (ENGINE_COSTS,),
    "calibrate": (TIMINGS,),
}
"""What a worker leaves that has done an action, or was asked to stop: one without has ended itself, as `os._exit(0)`
does."""
LAST_ACTIONS = ("train", "calibrate")
"""Those of the last worker of a run, which may be the only one: a fork server for it would be loaded for nothing."""
START_S = 300.0
"""The time without progress that ends a worker, as long as few steps are measured; the most there is, too."""
STEPS, ENOUGH, LAST, LEAST_S = 20, 3, 100, 60.0
"""Once `ENOUGH` steps are measured: so many times the median of the last ones, but no less than `LEAST_S`."""
FORKABLE = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Variable with which torch counts GPUs without starting CUDA, which a process that is forked later could not use."""
LOST_S = 10.0
"""Seconds in which a rank has to notice that another one has failed, where nobody else ends it."""
GRACE_S = 3.0
"""Between asking srun to end its ranks and killing it."""


@dataclass(frozen=True)
class Outcome:
    """End of a worker or a run; `reason` is for the user."""

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
    timeout_s: float | None,
    *action: str,
    follow: Callable[[], None] = lambda: None,
    step: RankStep | None = None,
    inherits: Mapping[str, int] | None = None,
    names: RankNames = NO_RANKS,
    steps_s: Sequence[float] = (),
) -> None:
    """Have a worker do an action ("profile", "2") for the run in `folder`, to its end.

    With a `step` there are many workers, its ranks. The worker `inherits` file descriptors, each by the
    environment variable that says its number. For the rest see `supervise`. Raises `CannotRun` for problems that only a
    worker could find, `WorkerFailed` for every other end that is not good.
    """
    if action[0] not in LAST_ACTIONS:
        start_fork_server()
    command = [*_worker_command(), str(folder.resolve()), *action]
    results = [folder / name for name in RESULTS.get(action[0], ())]
    for path in results[:1]:
        path.unlink(missing_ok=True)
    with step.cleaning_up(folder, *action[1:]) if step else nullcontext():
        if step:
            command = [*step.command(), *command, step.token]
        outcome = supervise(command, folder, timeout_s, follow, step, inherits, names, steps_s)
    if outcome.problems:
        raise CannotRun(outcome.problems, title)
    if outcome.status != "ok":
        raise WorkerFailed(outcome)
    if results and not any(path.exists() for path in results):
        who = step.names.worker if step else names.worker
        raise WorkerFailed(Outcome("error", f"{who} ended with exit code 0 before it had a result"))


def become_worker(*action: str) -> NoReturn:
    """Have this process become a worker, which nobody supervises: a rank that torchrun has started."""
    command = [*_worker_command(), *action]
    os.execve(command[0], command, _environment())


def start_fork_server() -> None:
    """Have the workers of this scope forked from one process that has loaded torch (`harness.launch.fork_server`)."""
    fork_server.start(_worker_command(), _environment())


def measure_machine(
    folder: Path, title: str, timeout_s: float | None, kind: str, tf32: bool = False, parts: str = "all"
) -> Machine:
    """Measure `parts` of this machine (`harness.worker.profile_tasks`), of its devices of a `kind`, for the run in
    `folder`, whose `precision.tf32` is `tf32`, and cache the result; raises as `run_worker`."""
    run_worker(folder, title, timeout_s, "machine", kind, parts)
    measured = Machine.load(folder / MACHINE)
    (folder / MACHINE).unlink()
    machine.store(measured, tf32)
    return measured


def supervise(
    command: Sequence[str],
    run_dir: Path,
    timeout_s: float | None,
    follow: Callable[[], None] = lambda: None,
    step: RankStep | None = None,
    inherits: Mapping[str, int] | None = None,
    names: RankNames = NO_RANKS,
    steps_s: Sequence[float] = (),
) -> Outcome:
    """Run a process until it has ended or makes no progress; it and all that it started are continued return.

    Its output goes to `run_dir/log`; `follow` is called all the time meanwhile. Progress is a change of the `WATCHED`
    files. A worker that made none for `timeout_s` (None: as follows from the steps measured so far, `steps_s`) writes
    its Python stacks and is killed. If this process dies, the kernel kills the worker. With a `step` the command starts
    its ranks, on several nodes. It `inherits` descriptors as `run_worker` says.
    """
    given = inherits or {}
    reasons = ExitReasons(run_dir / LOG, step, names)
    hang.remove_dumps(run_dir)  # of a parent that was killed
    with (run_dir / LOG).open("ab") as log:
        while True:
            since = time.time()
            forked = None if step else _forked(command, log, given)
            # a process group of its own: Ctrl-C reaches the parent alone, and all that the worker starts ends with it
            with nullcontext() if step and not step.starts_one else blocked():
                worker = forked or subprocess.Popen(
                    [*die_with_parent.prefix(), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=_environment() | {name: str(descriptor) for name, descriptor in given.items()},
                    pass_fds=tuple(given.values()),
                    start_new_session=True,
                )
            watch = _Watch(worker, run_dir, timeout_s, steps_s, reasons.names, step)
            try:
                outcome = watch.outcome(follow, reasons, log)
            finally:
                _end(worker, step, since)
                hang.remove_dumps(run_dir)
            if outcome.status in ("ok", "timeout") or not reasons.try_again():
                break
    follow()
    return outcome


def _forked(command: Sequence[str], log: IO[bytes], inherits: Mapping[str, int]) -> ForkedWorker | None:
    """A worker, forked by the server that has loaded torch; None if there is no server, or the command is another."""
    own = _worker_command()
    if list(command[: len(own)]) != own:
        return None
    return fork_server.fork(command[len(own) :], log, _environment(), inherits)


def _worker_command() -> list[str]:
    """The start of a worker's command line. -P: a module in the user's folder does not hide one of this project."""
    return [sys.executable, "-P", "-m", "harness.worker"]


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    settings = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **FORKABLE, **CUDA_ORDER}
    return os.environ | malloc.environment() | settings


@dataclass(frozen=True)
class _Watch:
    """Looks at a worker until it ends, or makes no progress."""

    worker: subprocess.Popen[bytes] | ForkedWorker
    run_dir: Path
    timeout_s: float | None
    steps_s: Sequence[float]
    names: RankNames
    step: RankStep | None

    def outcome(self, follow: Callable[[], None], reasons: ExitReasons, log: IO[bytes]) -> Outcome:
        seen, since = _progress(self.run_dir), time.monotonic()
        while (code := self.worker.poll()) is None:
            files.cut_in_half(self.run_dir / LOG, LOG_BYTES)
            now = _progress(self.run_dir)
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > limit_s(self.timeout_s, self.steps_s):
                return Outcome("timeout", self._hang(log))
            elif self._others_failed() and time.monotonic() - since > LOST_S:
                code = 1
                break
            follow()
            ends_within(self.worker, LOOK_S)
        if code == 0:
            return Outcome("ok")
        failure = reasons.explain(code)
        return Outcome(failure.status, failure.message, failure.problems)

    def _others_failed(self) -> bool:
        """Whether a rank has failed that this process has not started, and cannot end."""
        return self.step is not None and self.step.starts_one and (self.run_dir / ERROR).exists()

    def _hang(self, log: IO[bytes]) -> str:
        def ask() -> None:
            _signal_group(self.worker, signal.SIGUSR2)

        limit = limit_s(self.timeout_s, self.steps_s)
        count = self.step.mesh.size if self.step else None
        who = hang.explain(self.run_dir, self.names, self.worker.pid, count, ask, log)
        return f"no progress for launch.timeout_s={limit:g} s: {who}"


def limit_s(given: float | None, steps_s: Sequence[float]) -> float:
    """The seconds without progress that end a worker: what the user has given, or what follows from its steps."""
    if given is not None:
        return given
    if len(steps_s) < ENOUGH:
        return START_S
    return min(max(STEPS * statistics.median(steps_s[-LAST:]), LEAST_S), START_S)


def _progress(run_dir: Path) -> list[tuple[int, int]]:
    """Sizes and times of the watched files."""
    state = []
    for name in WATCHED:
        for path in (run_dir / name, *(run_dir / name).glob("*")):
            with suppress(OSError):
                found = path.stat()
                state.append((found.st_size, found.st_mtime_ns))
    return state


def _end(worker: subprocess.Popen[bytes] | ForkedWorker, step: RankStep | None, since: float) -> None:
    """End the worker, and all that it has started `since` then; srun ends its ranks on other nodes first."""
    clean = worker.poll() == 0
    if step and not step.starts_one and isinstance(worker, subprocess.Popen):
        _signal_group(worker, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            worker.wait(GRACE_S)
    _signal_group(worker, signal.SIGKILL)
    worker.wait()
    if not clean:  # it cannot do that itself
        mpi.remove_orphaned_memory(since)


def _signal_group(worker: subprocess.Popen[bytes] | ForkedWorker, number: signal.Signals) -> None:
    if isinstance(worker, ForkedWorker) and worker.returncode is not None:
        return  # the server has ended its group, and the number may be another one's
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.pid, number)
