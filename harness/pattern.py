"""A periodic schedule (MadPipe, section 4): every `period_s` each op starts once, on a later micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from harness.op import Op


@dataclass(frozen=True)
class Placed:
    """One op of a pattern: it starts at `start_s` of each period and works on micro-batch (period index - `shift`)."""

    op: Op
    device: int
    start_s: float
    shift: int


@dataclass(frozen=True)
class Pattern:
    period_s: float
    ops: tuple[Placed, ...]
