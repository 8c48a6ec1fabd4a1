"""A periodic schedule (MadPipe, section 4): every `period_s` each op starts once, on a later micro-batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.core.op import Op


@dataclass(frozen=True)
class Placed:
    """One op of a pattern: it starts at `start_s` of each period and works on micro-batch (period index - `shift`).

    The micro-batch of `op` itself has no meaning. A message is on the device of the stage that receives it.
    """

    op: Op
    device: int
    start_s: float
    shift: int

    def __post_init__(self) -> None:
        if not math.isfinite(self.start_s):
            raise ValueError(f"start_s of {self.op} is {self.start_s}, must be a finite number")


@dataclass(frozen=True)
class Pattern:
    """A periodic schedule: `ops` that repeat every `period_s`, for ever.

    `harness.schedule.builders.periodic` unrolls it, `harness.schedule.pattern_validity` checks it,
    `harness.report.pattern_text` and `harness.report.pattern_plot` draw it.
    """

    period_s: float
    ops: tuple[Placed, ...]

    def __post_init__(self) -> None:
        if not (math.isfinite(self.period_s) and self.period_s > 0):
            raise ValueError(f"period_s is {self.period_s}, must be a finite number above 0")
