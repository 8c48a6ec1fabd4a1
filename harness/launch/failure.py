"""Report a failure in a worker to the user.

Failure        an exception as `error.json`, written by the rank that fails first
ExitReasons    why a worker ended: its `error.json`, what Slurm says, what the kernel did, what the exit code means
"""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from harness.core import units
from harness.core.error_notes import RankNote, has_note
from harness.core.problem import CannotRun, Problem, ProblemError
from harness.core.record import Status
from harness.core.run_files import ERROR
from harness.core.serialization import Document
from harness.host import bytecode, ending_signals, oom_killer
from harness.launch import slurm_log
from harness.launch.rank_names import NO_RANKS, RankNames
from harness.launch.rank_step import RankStep
from harness.launch.slurm_log import StepEnd
from harness.launch.slurm_step import PATIENCE_S, TRIES

OUTPUT_BYTES = 1 << 20
"""At the end of the log: these hold how the ranks ended."""
LOST_PEER = re.compile(
    r"connection (was )?(likely )?(closed|reset|aborted|lost)|broken pipe|remote worker crashing"
    r"|remote process (exited|has terminated)|ncclRemoteError|socket closed",
    re.IGNORECASE,
)
"""Messages of gloo, NCCL and torch's store in a rank whose peer has ended: no cause, but what follows from one."""
ALLOCATOR = "can't allocate memory"
"""Message of torch's allocator for CPUs; the requested size follows it."""
LOOK_S = 0.05
DISK_FULL_CODE = 28
"""The exit code of a rank that could not write: then `error.json` may be missing too."""
DISK_FULL = "no space is left on the disk: free some, or put the run elsewhere with out=DIR"


@dataclass(frozen=True)
class Failure(Document):
    """An exception: its type, its message with the notes that engines add ("in stage 1, layer x, micro-batch 3").

    `rank` is that of a rank that srun has started; failures of forked ranks reach the user through their host.
    """

    status: Status
    message: str
    problems: tuple[Problem, ...] = ()
    traceback: str = ""
    rank: int | None = None

    @classmethod
    def of(cls, error: BaseException, rank: int | None = None) -> Self:
        """The failure that `error` is. A full disk and a lack of memory are distinguished from other errors; what is
        refused while it trains, a ProblemError, is refused as it would be before."""
        trace = "".join(traceback.format_exception(error))
        if isinstance(error, ProblemError):
            notes, error = getattr(error, "__notes__", []), CannotRun(error.problems)
            error.__notes__ = notes
        problems = error.problems if isinstance(error, CannotRun) else ()
        message = _message(error)
        if rank is not None and not isinstance(error, CannotRun) and not has_note(error, RankNote):
            message += f"\nin rank {rank} on {socket.gethostname()}"
        return cls(_status(error), message, tuple(problems), trace, rank)

    def report(self, folder: Path) -> None:
        """Write `error.json`, unless another rank has: the first failure is the cause, later ones follow from it."""
        own = folder / f".{ERROR}.{socket.gethostname()}-{os.getpid()}"
        self.save(own)
        try:
            os.link(own, folder / ERROR)  # of several ranks one alone can, and the file is whole
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            self.save(folder / ERROR)
        finally:
            own.unlink()


def _status(error: BaseException) -> Status:
    if isinstance(error, CannotRun):
        return "infeasible"
    allocator = isinstance(error, RuntimeError) and ALLOCATOR in str(error)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or allocator:
        return "oom"
    return "error"


def _message(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return DISK_FULL
    if damaged := bytecode.explain(error):
        return damaged
    text = str(error) or repr(error)
    if ALLOCATOR in text and (limit := oom_killer.limit_bytes()):
        text += f" ({units.size(limit)} are here in all)"
    if not isinstance(error, CannotRun):
        text = f"{type(error).__name__}: {text}"
    return "\n".join([text, *getattr(error, "__notes__", [])])


class ExitReasons:
    """Finds out why a worker ended. Made before the worker starts; with a `step` the worker is srun, with its ranks."""

    def __init__(self, log: Path, step: RankStep | None = None, names: RankNames = NO_RANKS) -> None:
        self.names = step.names if step else names
        self.log, self.step, self.kills = log, step, oom_killer.kill_count()
        self.start = log.stat().st_size if log.exists() else 0
        self.tries = step.tries if step else 0
        (log.parent / ERROR).unlink(missing_ok=True)  # of an earlier start

    def explain(self, code: int) -> Failure:
        """Why the worker ended with exit code `code`, or by signal -`code`."""
        if self.step:
            if self.step.starts_one and code < 0:
                return self._explain_code(self._rank_name(0), code)
            self._wait_for_other_nodes(self.step.late_s)
        reported = self._reported()
        if self.step:
            end = self._step_end()
            if reported and LOST_PEER.search(reported.message):
                end = slurm_log.killed_end(self._output(), self._rank_name) or end
            return self._explain_step(code, reported, end)
        return reported or self._explain_code(self.names.worker, code)

    def _wait_for_other_nodes(self, late_s: float) -> None:
        """Wait until another node has said how a rank ended there, if this one has only lost its connection to it."""
        deadline = time.monotonic() + late_s
        while time.monotonic() < deadline and not slurm_log.killed_end(self._output(), self._rank_name):
            reported = self._reported()
            if reported and not LOST_PEER.search(reported.message):
                return
            time.sleep(LOOK_S)

    def try_again(self) -> bool:
        """Whether no rank has started, and srun should be tried once more: ranks repeat no step."""
        self.tries -= 1
        end = self._step_end() if self.tries > 0 else None
        if end is None or end.started:
            return False
        self.start = self.log.stat().st_size
        return True

    def _reported(self) -> Failure | None:
        """What the first rank that failed has written, if one has."""
        path = self.log.parent / ERROR
        return Failure.load(path) if path.exists() else None

    def _output(self) -> str:
        """The end of what has been printed since the start."""
        size = self.log.stat().st_size
        with self.log.open("rb") as file:
            file.seek(max(self.start if self.start < size else 0, size - OUTPUT_BYTES, 0))
            return file.read().decode(errors="replace")

    def _step_end(self) -> StepEnd | None:
        return slurm_log.step_end(self._output(), self._rank_name, PATIENCE_S * TRIES)

    def _explain_step(self, code: int, reported: Failure | None, end: StepEnd | None) -> Failure:
        if reported and not (end and _overrules(end, reported)):
            return reported
        if end is None:
            return self._explain_code(self.step.starter if self.step else "srun", code)
        if end.rank is not None and end.killed and oom_killer.was_oom_kill(self.kills):  # on this node
            return Failure(*oom_killer.explain_kill(self._rank_name(end.rank), self.kills), rank=end.rank)
        if end.exit_code == DISK_FULL_CODE:
            return Failure("error", DISK_FULL, rank=end.rank)
        line = slurm_log.last_line(self._output()) if end.rank is not None and not end.by_signal else ""
        return Failure(end.status, f"{end.reason}: {line}" if line else end.reason, rank=end.rank)

    def _rank_name(self, rank: int) -> str:
        return f"{self.names.rank(rank)},"

    def _explain_code(self, who: str, code: int) -> Failure:
        if code == DISK_FULL_CODE:
            return Failure("error", DISK_FULL)
        if code == -signal.SIGKILL:
            return Failure(*oom_killer.explain_kill(who, self.kills))
        if code < 0:
            return Failure("error", ending_signals.explain(who, -code))
        last = slurm_log.last_line(self._output()) or "its log is empty"
        return Failure("error", f"{who} ended with exit code {code}: {last}")


def _overrules(end: StepEnd, reported: Failure) -> bool:
    """Whether a rank's report follows from what Slurm says: of a rank that could not report itself, of a lost node. Or
    it is the line of the log that says so, which that rank's parent has written."""
    if reported.message.startswith(slurm_log.SLURM):
        return True
    if end.by_signal:
        return end.rank != reported.rank
    return end.status != "error" and reported.status == "error"
