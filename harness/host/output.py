"""stdout and stderr that may come to their end before the program does: `run.py | head -1`, `> FILE` on a full disk.

What cannot be written is dropped, and whoever prints need not know: the work goes on, and an OSError that it meets is
one of its own files. A reader that is gone is no news; another reason is one line on stderr.
"""

from __future__ import annotations

import io
import os
import select
import sys
from contextlib import suppress
from typing import Any

BROKEN_PIPE_CODE = 141
"""The exit code of a command that SIGPIPE ends, as shells report it."""
_lost: dict[int, OSError] = {}
"""Why the descriptor leads nowhere by now."""


_stderr: list[Any] = []
"""The stderr of the command, also while that of a point of a sweep goes to its file."""


def protect() -> None:
    """From now on nothing that is printed raises OSError, or UnicodeError. To be called before anything is."""
    sys.stdout, sys.stderr = _protected(sys.stdout, 1), _protected(sys.stderr, 2)
    _stderr[:] = [sys.stderr]


def code(otherwise: int) -> int:
    """The exit code of a command whose output is all that it does: `otherwise`, if the output was written."""
    with suppress(ValueError):  # closed
        sys.stdout.flush()
    if 1 not in _lost:
        return otherwise
    return BROKEN_PIPE_CODE if isinstance(_lost[1], BrokenPipeError) else 1


def _protected(stream: Any, descriptor: int) -> Any:
    if stream is None:  # closed: else the next file that is opened would be taken for it
        _lead_nowhere(descriptor)
        return io.TextIOWrapper(io.BufferedWriter(_Output(descriptor)), encoding="utf-8", errors="replace")
    stream.flush()
    written: Any = _Output(descriptor)
    return io.TextIOWrapper(
        written if stream.write_through else io.BufferedWriter(written),  # python -u
        encoding=stream.encoding,
        errors="backslashreplace" if stream.errors == "strict" else stream.errors,  # names of files may be no text
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Output(io.FileIO):
    """Writes to a descriptor until that fails, and from then on nowhere."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        whole = rest.nbytes
        try:
            while rest:
                written = super().write(rest)
                if written is None:  # a pipe that is full, and does not block
                    select.select([], [self], [])
                rest = rest[written or 0 :]
        except OSError as error:
            _lost[self.fileno()] = error
            _lead_nowhere(self.fileno())
            if self.fileno() == 1 and not isinstance(error, BrokenPipeError):
                print(f"stdout cannot be written: {error.strerror}", file=next(iter(_stderr), sys.stderr), flush=True)
        return whole


def _lead_nowhere(descriptor: int) -> None:
    """Processes that are started later inherit that."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
