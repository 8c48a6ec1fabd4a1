"""How a rank's exception reaches the user: `error.json`, written by the rank that fails first."""

from __future__ import annotations

import errno
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from harness.problem import CannotRun, Problem
from harness.record import Status
from harness.serial import Document

FILE = "error.json"
DISK_FULL = "no space is left on the disk: free some, or put the run elsewhere with out=DIR"


@dataclass(frozen=True)
class Failure(Document):
    """An exception: its type, its message with the notes that engines add ("in stage 1, layer x, micro-batch 3")."""

    status: Status
    message: str
    problems: tuple[Problem, ...] = ()
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """The failure that `error` is. A full disk and a lack of memory are told apart from other errors."""
        problems = error.problems if isinstance(error, CannotRun) else ()
        trace = "".join(traceback.format_exception(error))
        return cls(_status(error), _message(error), tuple(problems), trace)

    def report(self, folder: Path) -> None:
        """Write `error.json`, unless another rank has: the first failure is the cause, later ones follow from it."""
        if not (folder / FILE).exists():
            self.save(folder / FILE)


def _status(error: BaseException) -> Status:
    if isinstance(error, CannotRun):
        return "infeasible"
    allocator = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or allocator:
        return "oom"
    return "error"


def _message(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return DISK_FULL
    text = str(error) or repr(error)
    if not isinstance(error, CannotRun):
        text = f"{type(error).__name__}: {text}"
    return "\n".join([text, *getattr(error, "__notes__", [])])
