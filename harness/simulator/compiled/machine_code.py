"""What numba compiles, loaded."""

from __future__ import annotations

import numba
import numpy as np

from harness.core.op import Op
from harness.simulator.compiled import event_loop, kept_code
from harness.simulator.compiled.event_loop import execute
from harness.simulator.compiled.fullest import fullest
from harness.simulator.compiled.tables import tables_of
from harness.simulator.event_loop import Work

__all__ = ["execute", "fullest", "start"]


def start() -> None:
    """Makes the machine code, or reads it from its folder. Raises RuntimeError where numba compiles nothing by its
    settings, OSError, EOFError or UnpicklingError where the folder cannot be written or read."""
    if vars(numba.config)["DISABLE_JIT"]:
        raise RuntimeError("NUMBA_DISABLE_JIT is set")
    for function in (event_loop.run, fullest):
        kept_code.read_alone(function)
    execute(tables_of(Work([0.0], [0], [[]]), [Op(0, "F", 0)]))
    nothing, none = np.zeros(0), np.zeros(0, dtype=np.int64)
    fullest(nothing, none, none, nothing, none, none, 1)
