"""Why a rank ended: what it said itself, what Slurm says of it, what the kernel did, what its exit code means."""

from __future__ import annotations

import signal
from pathlib import Path

from harness import failure, oom, srun_words
from harness.failure import DISK_FULL_CODE, Failure
from harness.srun import PATIENCE_S, TRIES, Step
from harness.srun_words import End

LOOKED_AT = 1 << 20
"""So many bytes at the end of the log can hold how the ranks ended."""


class Endings:
    """What is known before the ranks of a run start, for when one of them ends. `step`: they are tasks of srun."""

    def __init__(self, log: Path, step: Step | None = None) -> None:
        self.log, self.step, self.kills = log, step, oom.kills()
        self.begin = log.stat().st_size if log.exists() else 0
        self.tries = TRIES if step else 0
        (log.parent / failure.FILE).unlink(missing_ok=True)  # of an earlier start

    def of(self, number: int, code: int) -> Failure:
        """Why process `number` ended with exit code `code`, or by signal -`code`."""
        told = self.told()
        if self.step:
            return self._of_step(code, told, self._end())
        return told or self._of_code(f"rank {number}", code)

    def again(self) -> bool:
        """Whether no rank has begun, and srun should be tried once more: ranks repeat no step."""
        self.tries -= 1
        end = self._end() if self.tries > 0 else None
        if end is None or end.begun:
            return False
        self.begin = self.log.stat().st_size
        return True

    def told(self) -> Failure | None:
        """What the first rank that failed has said, if one has."""
        path = self.log.parent / failure.FILE
        return Failure.load(path) if path.exists() else None

    def said(self) -> str:
        """The end of what has been printed since the start."""
        size = self.log.stat().st_size
        with self.log.open("rb") as file:
            file.seek(max(self.begin if self.begin < size else 0, size - LOOKED_AT, 0))
            return file.read().decode(errors="replace")

    def _end(self) -> End | None:
        return srun_words.end(self.said(), self._named, PATIENCE_S * TRIES)

    def _of_step(self, code: int, told: Failure | None, end: End | None) -> Failure:
        if told and not (end and _overrules(end, told)):
            return told
        if end is None:
            return self._of_code("srun", code)
        if end.rank is not None and end.killed and oom.killed(self.kills):  # on this node; Slurm tells of others
            return Failure(*oom.verdict(self._named(end.rank), self.kills), rank=end.rank)
        if end.reason.endswith(f"exit code {DISK_FULL_CODE}"):
            return Failure("error", failure.DISK_FULL, rank=end.rank)
        line = srun_words.last_line(self.said()) if end.rank is not None and not end.by_signal else ""
        return Failure(end.status, f"{end.reason}: {line}" if line else end.reason, rank=end.rank)

    def _named(self, rank: int) -> str:
        return f"rank {rank}, stage {self.step.stage(rank)}," if self.step else f"rank {rank}"

    def _of_code(self, who: str, code: int) -> Failure:
        if code == DISK_FULL_CODE:
            return Failure("error", failure.DISK_FULL)
        if code == -signal.SIGKILL:
            return Failure(*oom.verdict(who, self.kills))
        if code < 0:
            return Failure("error", f"{who} ended by signal {-code} ({signal.Signals(-code).name})")
        last = srun_words.last_line(self.said()) or "its log is empty"
        return Failure("error", f"{who} ended with exit code {code}: {last}")


def _overrules(end: End, told: Failure) -> bool:
    """Whether what a rank has said follows from what Slurm tells of: a rank that could say nothing, a lost node."""
    if end.by_signal:
        return end.rank != told.rank
    return end.status != "error" and told.status == "error"
