"""The points of the sweeps autoddl_fig3 to autoddl_table3, with their records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from analysis import match_records
from harness.core.record import RunRecord
from harness.sweep.points import Point

SWEEPS = ("fig3", "table2", "fig4", "fig7", "fig8", "fig9", "fig10", "table3")
"""Sweeps in the order of the paper."""
FOLDERS = [f"autoddl_{name}" for name in SWEEPS]
"""Names of the sweeps' folders in runs/."""


class Row(match_records.Row):
    @property
    def micro_batches(self) -> int:
        return int(self["batch.micro_batches"] or 1)

    @property
    def communication_s(self) -> float:
        return float(self.predicted["communication_s"])

    @property
    def strategy(self) -> dict[str, tuple[int, ...]]:
        """(p0, p1, p2) of each matmul; on several nodes of several devices pairs of them, one after the other."""
        return {name: tuple(numbers) for name, numbers in self.plan["strategy"].items()}


class Results(match_records.Points[Row]):
    """The records of the paper's sweeps."""

    def __init__(self, records: Iterable[RunRecord]) -> None:
        super().__init__("autoddl", Row, FOLDERS, records)


def largest(rows: Sequence[Row]) -> Row | None:
    """Return the row with the largest micro-batches that fit."""
    return min((row for row in rows if row.ok), key=lambda row: row.micro_batches, default=None)


def fastest(rows: Sequence[Row]) -> Row | None:
    """Return the row with the shortest step among those that fit."""
    return min((row for row in rows if row.ok), key=lambda row: row.step_s, default=None)


def smallest(rows: Sequence[Row]) -> Row | None:
    """Return the row with the smallest micro-batches that can be split."""
    return max((row for row in rows if row.ok), key=lambda row: row.micro_batches, default=None)


def sweep_points(sweep: str) -> tuple[Point, ...]:
    """The points of one of `SWEEPS`."""
    return match_records.points_of(f"autoddl_{sweep}")
