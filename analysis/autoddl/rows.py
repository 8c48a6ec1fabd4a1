"""The points of the sweeps autoddl_fig3 to autoddl_table3, and which records belong to them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.record import RunRecord
from harness.sweep_points import Point, expand

SWEEPS = ("fig3", "table2", "fig4", "fig7", "fig8", "fig9", "fig10", "table3")
"""By their order in the paper."""


@dataclass(frozen=True)
class Row:
    """A point by its overrides (`values`), and its record; None if it was not run."""

    values: dict[str, str]
    record: RunRecord | None

    def __getitem__(self, key: str) -> str:
        """The value of an override; "" where the point has none of it."""
        return self.values.get(key, "")

    @property
    def ok(self) -> bool:
        return self.record is not None and self.record.status == "ok"

    @property
    def micro_batches(self) -> int:
        return int(self["batch.micro_batches"] or 1)

    @property
    def step_s(self) -> float:
        return float(self._record.metrics["step_time_s"])

    @property
    def communication_s(self) -> float:
        return float(self.predicted["communication_s"])

    @property
    def predicted(self) -> dict[str, Any]:
        return self._record.predicted

    @property
    def strategy(self) -> dict[str, tuple[int, ...]]:
        """(p0, p1, p2) of each product; on several nodes of several devices pairs of them, one after the other."""
        plan: Any = self._record.plan
        return {name: tuple(numbers) for name, numbers in plan["strategy"].items()}

    @property
    def _record(self) -> RunRecord:
        if self.record is None:
            raise ValueError(f"{self.values} has not been run")
        return self.record


class Results:
    """The records, by sweep and point. Of several for a point the latest counts."""

    def __init__(self, records: Iterable[RunRecord]) -> None:
        self._latest = {_key(record.manifest.get("overrides", [])): record for record in records}

    def rows(self, sweep: str, keep: Callable[[Row], bool] = lambda row: True) -> list[Row]:
        """The points of a sweep, in order."""
        found = (Row(point.values(), self._latest.get(_key(point.overrides))) for point in points(sweep))
        return [row for row in found if keep(row)]

    def was_run(self, sweep: str) -> bool:
        return any(row.record for row in self.rows(sweep))


def largest(rows: Sequence[Row]) -> Row | None:
    """Of rows that differ in their micro-batches that with the largest ones that fit."""
    return min((row for row in rows if row.ok), key=lambda row: row.micro_batches, default=None)


def fastest(rows: Sequence[Row]) -> Row | None:
    """Of rows that fit that with the shortest step."""
    return min((row for row in rows if row.ok), key=lambda row: row.step_s, default=None)


@functools.cache
def points(sweep: str) -> tuple[Point, ...]:
    return tuple(expand([f"+sweeps=autoddl_{sweep}"]))


def _key(overrides: Iterable[str]) -> frozenset[str]:
    """What tells a point; where its record lies does not."""
    return frozenset(text for text in overrides if not text.startswith("out="))
