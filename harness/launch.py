"""Ranks: started, watched and ended by one parent. Every wait has an end."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, TypeVar

from harness import files, malloc, orphan
from harness.endings import Endings
from harness.interfaces import Engine, Model, Session, SessionSpec
from harness.plan import Plan
from harness.problem import Problem
from harness.record import Status
from harness.run_files import METRICS
from harness.srun import Step

if TYPE_CHECKING:
    from harness.meeting import Meeting

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
LOG = "log"
LOG_BYTES = 256 << 20
"""A rank that prints without end does not fill the disk."""
WATCHED = (LOG, METRICS)
"""The files in which a rank's progress shows."""
POLL_S = 0.05
DUMP_S = 1.0
"""How long a rank that hangs may write its Python stacks."""
FORKABLE = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""With it torch asks for GPUs without starting CUDA, which no process that is forked later could use."""
GRACE_S = 3.0
"""Between asking a rank to end and killing it."""


@dataclass(frozen=True)
class Outcome:
    """How the ranks ended; `reason` is for the user."""

    status: Status
    reason: str = ""
    problems: tuple[Problem, ...] = ()


class Preempted(KeyboardInterrupt):
    """The user or the scheduler ended the run; the message names the signal, `number` is it."""

    def __init__(self, message: str, number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.number = number


def call(
    engine: Engine, model: Model, plan: Plan, spec: SessionSpec, fn: Callable[[Session], T],
    meeting: Meeting | None = None,
) -> T:  # fmt: skip
    """Open a session of an engine, apply `fn` to it, close it.

    An engine of ranks gets one for each device of the mesh: all call `fn`, and what it returns in rank 0 comes back.
    With a `meeting` this process is itself one of them.
    """
    opened = engine.session(model, plan, spec)

    def work() -> T:
        with opened as session:
            return fn(session)

    if not engine.capabilities.ranks:
        return work()
    from harness import ranks
    from harness.rank_session import RankSession

    try:
        return ranks.each(plan.mesh.size, work, spec.devices, engine.capabilities.mpi, meeting)
    except ranks.RankLost as error:
        if isinstance(opened, RankSession) and (where := opened.last_seen(error.rank)):
            error.add_note(where)
        raise


def supervise(
    commands: Sequence[Sequence[str]],
    run_dir: Path,
    timeout_s: float,
    on_progress: Callable[[], None] = lambda: None,
    step: Step | None = None,
) -> Outcome:
    """Run a process for each command until all have ended well, or the first has failed, or none makes progress.

    Their output goes to `run_dir/log`; `on_progress` is called all the time in between. Progress is a change of the
    ranks' files. A rank that made none for `timeout_s` gets SIGUSR2 (it writes its Python stacks) and is killed.
    However this function is left, no process stays behind; if this process dies, the kernel kills them. With a `step`
    the commands are srun's, and its ranks are on the nodes of the job.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    endings = Endings(run_dir / LOG, step)
    with (run_dir / LOG).open("ab") as log:
        try:
            while True:
                for command in commands:
                    ranks.append(_start(command, log))
                outcome = _watch(ranks, run_dir, timeout_s, on_progress, endings)
                if outcome.status in ("ok", "timeout") or not endings.again():
                    break
                _end(ranks)
                ranks.clear()
        finally:
            _end(ranks)
    on_progress()
    return outcome


class Signals:
    """What SIGINT, SIGTERM, SIGUSR1 and SIGHUP do while a run is under way; see `preemptible`.

    While `noting` the first one is only noted, its name in `asked`, and so are those behind it: only SIGINT, from a
    user who will not wait, is raised then.
    """

    def __init__(self) -> None:
        self.ignored = self.noting = False
        self.asked = ""

    def handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.ignored:
            return
        if self.noting and not (self.asked and number == signal.SIGINT):
            self.asked = self.asked or name
            return
        self.ignored = True
        raise Preempted(f"ended by {name}", number)


@contextmanager
def preemptible() -> Iterator[Signals]:
    """Within it these signals raise `Preempted`, once: further ones do not disturb the tidying up.

    Nor does any after `ignored` of what is yielded has been set to True. Without effect outside the main thread.
    """
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    former = {number: signal.signal(number, signals.handle) for number in numbers}
    try:
        yield signals
    finally:
        for number, action in former.items():
            signal.signal(number, action)


def _start(command: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """In a process group of its own: Ctrl-C reaches the parent alone, and all that a rank starts ends with it."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    settings = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **FORKABLE}
    return subprocess.Popen(
        [*orphan.prefix(), *command],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=os.environ | malloc.environment() | settings,
        start_new_session=True,
    )


def _watch(
    ranks: Sequence[subprocess.Popen[bytes]], run_dir: Path, timeout_s: float, on_progress: Callable[[], None],
    endings: Endings,
) -> Outcome:  # fmt: skip
    seen, since = _state(run_dir), time.monotonic()
    while True:
        codes = [rank.poll() for rank in ranks]
        for number, code in enumerate(codes):
            if code:
                told = endings.of(number, code)
                return Outcome(told.status, told.message, told.problems)
        if all(code == 0 for code in codes):
            return Outcome("ok")
        files.shorten(run_dir / LOG, LOG_BYTES)
        now = _state(run_dir)
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > timeout_s:
            _dump(ranks)
            reason = f"no progress for launch.timeout_s={timeout_s:g} s; each rank's Python stack is in the log"
            return Outcome("timeout", reason)
        on_progress()
        time.sleep(POLL_S)


def _state(run_dir: Path) -> list[tuple[int, int]]:
    state = []
    for name in WATCHED:
        with suppress(FileNotFoundError):
            found = (run_dir / name).stat()
            state.append((found.st_size, found.st_mtime_ns))
    return state


def _dump(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        _signal_group(rank, signal.SIGUSR2)
    time.sleep(DUMP_S)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End what is left of the ranks and of all that they started."""
    for rank in ranks:
        _signal_group(rank, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    for rank in ranks:
        with suppress(subprocess.TimeoutExpired):
            rank.wait(max(0.0, deadline - time.monotonic()))
    for rank in ranks:
        _signal_group(rank, signal.SIGKILL)
        rank.wait()


def _signal_group(rank: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(rank.pid, number)
