"""What `python -m slurm.status` and the like do, also in the midst of the imports: at Ctrl-C they print a line and no
traceback, and where nobody reads what they print they end quietly."""

from __future__ import annotations

import atexit
import os
import sys
from types import TracebackType

from harness.host import bytecode, output


def of_command() -> None:
    """For the `__init__` of a package with commands: has an effect while Python looks for the module that `-m` names,
    and none on who imports the package."""
    if sys.argv[:1] == ["-m"]:
        begin()


def begin() -> None:
    """This process is a command from now on."""
    sys.excepthook = _report
    output.protect()
    atexit.register(_end)  # before all others, so it is called after them


def keep_code() -> None:
    """The exit code of this command says how its work has ended, also where its output cannot be written."""
    atexit.unregister(_end)


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, KeyboardInterrupt) or isinstance(error.__cause__, KeyboardInterrupt):
        print("ended by SIGINT", file=sys.stderr)
    else:
        bytecode.report(kind, error, trace)


def _end() -> None:
    if code := output.code(0):
        os._exit(code)
