"""Compiled files of Python that are damaged: a full disk or a limit on file sizes leaves a part of one, which Python
takes for whole from then on."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]


def explain(error: BaseException) -> str | None:
    """Returns what to do where an import has ended by a damaged file; None for all other errors."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    if trace is None or trace.tb_frame.f_code.co_name != "_compile_bytecode":
        return None
    path = Path(trace.tb_frame.f_locals["bytecode_path"])
    folder = ROOT if path.is_relative_to(ROOT) else path.parent
    reason = f"Python cannot import {path}: it is damaged, as a full disk or ulimit -f leaves it"
    return f"{reason} -> find {folder} -name '*.pyc' -delete"


def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """For `sys.excepthook`: such an error is a line, others have a traceback."""
    if said := explain(error):
        print(said, file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)
