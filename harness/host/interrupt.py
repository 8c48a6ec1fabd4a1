"""Ctrl-C in a command such as `python -m slurm.status`: a line, and no traceback, also in the midst of the imports."""

from __future__ import annotations

import sys
from types import TracebackType


def of_command() -> None:
    """For the `__init__` of a package with commands: has an effect while Python looks for the module that `-m` names,
    and none on who imports the package."""
    if sys.argv[:1] == ["-m"]:
        sys.excepthook = _report


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, KeyboardInterrupt) or isinstance(error.__cause__, KeyboardInterrupt):
        print("ended by SIGINT", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)
