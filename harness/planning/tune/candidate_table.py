"""A search as it is reported on the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from harness.core.units import percent, rate, seconds, size
from harness.planning.tune.result import Line, Tuned

TITLES = (
    "micro-batch",
    "micro-batches",
    "pipeline",
    "data",
    "tensor",
    "analytic estimate",
    "simulated",
    "analytic / simulated",
    "throughput, simulated",
)
NEARLY_FULL = 0.9
"""The share of a device's memory above which a predicted peak is marked."""
MARK = "!"


def simulated(found: Tuned) -> Table:
    """A row for each candidate that was simulated and fits, the fastest first."""
    table = Table(box=None, pad_edge=False)
    for title in (*TITLES, f"memory, simulated, of {size(found.best.memory_limit_bytes)}"):
        table.add_column(title, justify="right")
    for line, off in zip(found.simulated, found.off(), strict=True):
        table.add_row(*map(Text, _row(line, off)))
    return table


def reported(found: Tuned) -> Iterator[str]:
    """Yield what the mark means, the error of the analytic estimate, the number of candidates by outcome, and why those
    that are impossible are."""
    if any(map(_nearly_full, found.simulated)):
        yield (
            f"{MARK} above {percent(NEARLY_FULL)} of a device's memory: leave 10 to 20 % for an allocator "
            "(docs/explanation/accuracy.md)"
        )
    off = found.off()
    yield (
        f"analytic estimate / simulated: {min(off):.3f} to {max(off):.3f}, median {statistics.median(off):.3f}; "
        f"the best by simulation is number {_place(found)} by analytic estimate"
    )
    out = [line for line in found.lines if line.out]
    full = sum(line.full for line in out)
    left = len(found.lines) - len(out) - len(found.simulated)
    yield (
        f"{len(found.lines)} candidates: {len(found.simulated)} simulated, {left} slower by analytic estimate, "
        f"{full} too large for memory, {len(out) - full} impossible"
    )
    yield from map(str, found.impossible)


def _place(found: Tuned) -> int:
    """Rank, by analytic estimate, of the best candidate among those that were simulated and fit."""
    quicker = (line.closed_form_step_time_s or 0.0 for line in found.simulated)
    return 1 + sum(one < (found.best.closed_form_step_time_s or 0.0) for one in quicker)


def _row(line: Line, off: float) -> Iterator[str]:
    one, simulated_s = line.candidate, line.simulated_step_time_s
    yield from map(str, (one.micro_batch, one.micro_batches, one.mesh.pipeline, one.mesh.data, one.mesh.tensor))
    yield from (seconds(line.closed_form_step_time_s), seconds(simulated_s), f"{off:.3f}")
    mark = f" {MARK}" if _nearly_full(line) else "  "
    yield from (rate(one.batch / simulated_s if simulated_s else None), size(line.simulated_memory_bytes) + mark)


def _nearly_full(line: Line) -> bool:
    return (line.simulated_memory_bytes or 0) > NEARLY_FULL * (line.memory_limit_bytes or 0)
