"""The points of a paper's sweeps, and which records belong to them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from analysis.records import key_of, newest, point_of
from harness.record import RunRecord
from harness.sweep_points import Point, expand


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
    def step_s(self) -> float:
        return float(self._record.metrics["step_time_s"])

    @property
    def predicted(self) -> dict[str, Any]:
        return self._record.predicted

    @property
    def plan(self) -> Any:
        return self._record.plan

    @property
    def _record(self) -> RunRecord:
        if self.record is None:
            raise ValueError(f"{self.values} has not been run")
        return self.record


Kind = TypeVar("Kind", bound=Row)


class Points(Generic[Kind]):
    """The records of the sweeps PAPER_*, by sweep and point, as rows of some kind."""

    def __init__(self, paper: str, kind: type[Kind], records: Iterable[RunRecord]) -> None:
        self._paper, self._kind = paper, kind
        self._newest = newest(records, point_of)

    def rows(self, sweep: str, keep: Callable[[Kind], bool] = lambda row: True, scale: str | None = None) -> list[Kind]:
        """The points of a sweep, in order; of its first scale, if it has several and none is given."""
        points = points_of(f"{self._paper}_{sweep}", scale)
        found = (self._kind(point.values(), self._newest.get(key_of(point.overrides))) for point in points)
        return [row for row in found if keep(row)]

    def was_run(self, sweep: str, scale: str | None = None) -> bool:
        return any(row.record for row in self.rows(sweep, scale=scale))


@functools.cache
def points_of(sweep: str, scale: str | None = None) -> tuple[Point, ...]:
    """The points of sweeps/SWEEP.yaml, at one of its scales."""
    return tuple(expand([f"+sweeps={sweep}", *([f"scale={scale}"] if scale else [])]))
