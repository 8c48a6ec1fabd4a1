"""MadPipe's points as the paper would have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from analysis import match_records
from analysis.madpipe.sweep_results import ALL_OF_THEM, BAND, CONTIGUOUS, EXACT, PUBLISHED, SWEEPS, Row
from harness.core.record import RunRecord

ALL_SWEEPS = (*SWEEPS, ALL_OF_THEM, BAND)
Change = Callable[[Row, dict[str, Any]], dict[str, Any]]


def records(change: Change = lambda row, predicted: predicted, sweeps: tuple[str, ...] = ALL_SWEEPS) -> list[RunRecord]:
    """Every point as the paper would have it: what memory forbids makes PipeDream slower than MadPipe."""
    found = []
    for sweep in sweeps:
        for point in match_records.points_of(f"madpipe_{sweep}"):
            row = Row(point.values(), None)
            tight = 1 + 6 / row.memory_gb
            hopes = 1 / row.devices * {EXACT: 1.05, PUBLISHED: 1.1}.get(row.scheme, 1.0)
            period = tight / row.devices * {EXACT: 1.15, PUBLISHED: 1.2, CONTIGUOUS: 1.3}.get(row.scheme, 2.4)
            predicted = {"period_s": period, "first_phase_s": hopes, "one_device_s": 1.0,
                         "activations": [2 * row.devices - 1, 1], "finished": True}  # fmt: skip
            overrides = [f"{key}={value}" for key, value in point.values().items()]
            found.append(
                RunRecord("x", "ok", "simulated", predicted=change(row, predicted), manifest={"overrides": overrides})
            )
    return found
