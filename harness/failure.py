"""How a rank's exception reaches the user: `error.json`, written by the rank that fails first."""

from __future__ import annotations

import errno
import os
import socket
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from harness import display, oom
from harness.problem import CannotRun, Problem
from harness.record import Status
from harness.serial import Document

FILE = "error.json"
ALLOCATOR = "can't allocate memory"
"""What torch's allocator for CPUs says; it says how much it wanted, too."""
DISK_FULL_CODE = 28
"""The exit code of a rank that could not write: then `error.json` may be missing too."""
DISK_FULL = "no space is left on the disk: free some, or put the run elsewhere with out=DIR"


@dataclass(frozen=True)
class Failure(Document):
    """An exception: its type, its message with the notes that engines add ("in stage 1, layer x, micro-batch 3").

    `rank` is that of a rank that srun has started; others are told by their host, which knows no rank.
    """

    status: Status
    message: str
    problems: tuple[Problem, ...] = ()
    traceback: str = ""
    rank: int | None = None

    @classmethod
    def of(cls, error: BaseException, rank: int | None = None) -> Self:
        """The failure that `error` is. A full disk and a lack of memory are told apart from other errors."""
        problems = error.problems if isinstance(error, CannotRun) else ()
        trace = "".join(traceback.format_exception(error))
        message = _message(error)
        if rank is not None and not isinstance(error, CannotRun) and f"in rank {rank}" not in message:
            message += f"\nin rank {rank}"
        return cls(_status(error), message, tuple(problems), trace, rank)

    def report(self, folder: Path) -> None:
        """Write `error.json`, unless another rank has: the first failure is the cause, later ones follow from it."""
        own = folder / f".{FILE}.{socket.gethostname()}-{os.getpid()}"
        self.save(own)
        try:
            os.link(own, folder / FILE)  # of several ranks one alone can, and the file is whole
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            self.save(folder / FILE)
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
    text = str(error) or repr(error)
    if ALLOCATOR in text and (limit := oom.limit_bytes()):
        text += f" ({display.size(limit)} are here in all)"
    if not isinstance(error, CannotRun):
        text = f"{type(error).__name__}: {text}"
    return "\n".join([text, *getattr(error, "__notes__", [])])
