"""The points of a paper's sweeps, and which records belong to them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from analysis.records import RESULTS, key_of, newest, point_of, sweep_command
from analysis.report import not_run
from analysis.run_artifacts import ORIGIN
from harness.core.record import RunRecord
from harness.sweep.points import Point, expand


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
    def ran(self) -> bool:
        """Whether it has a result; that nothing fits is one, too."""
        return self.record is not None and self.record.status in RESULTS

    @property
    def place(self) -> str:
        """The place of its record."""
        return str(self._record.manifest[ORIGIN])

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


@dataclass(frozen=True)
class Need(Generic[Kind]):
    """Points that a claim needs, all of them: those of a sweep's scale that `keep` picks.

    They have to have ended well (`ok`), or to have any result.
    """

    sweep: str
    scale: str | None = None
    keep: Callable[[Kind], bool] = lambda row: True
    ok: bool = True


class Points(Generic[Kind]):
    """The records of the sweeps PAPER_*, by sweep and point, as rows of some kind.

    `folders` name the paper's sweeps as they are called in runs/: PAPER_SWEEP, or PAPER_SWEEP-SCALE.
    """

    def __init__(self, paper: str, kind: type[Kind], folders: Sequence[str], records: Iterable[RunRecord]) -> None:
        self._paper, self._kind, self._folders = paper, kind, folders
        self._newest = newest(records, point_of)

    def rows(self, sweep: str, keep: Callable[[Kind], bool] = lambda row: True, scale: str | None = None) -> list[Kind]:
        """The points of a sweep, in order; of its first scale, if it has several and none is given."""
        points = points_of(f"{self._paper}_{sweep}", scale)
        all_rows = (self._kind(point.values(), self._newest.get(key_of(point.overrides))) for point in points)
        return [row for row in all_rows if keep(row)]

    def was_run(self, sweep: str, scale: str | None = None) -> bool:
        """Whether a point has been run, well or not."""
        return any(row.record for row in self.rows(sweep, scale=scale))

    def count(self, sweep: str, scale: str | None = None) -> tuple[int, int]:
        """Return the number of points with a result, and of all points."""
        rows = self.rows(sweep, scale=scale)
        return sum(row.ran for row in rows), len(rows)

    def others(self) -> int:
        """Return the number of points with records that no sweep of the paper has."""
        names = (folder.partition("-") for folder in self._folders)
        known = {key_of(point.overrides) for sweep, _, scale in names for point in points_of(sweep, scale or None)}
        return len(self._newest.keys() - known)

    def missing(self) -> str:
        """The commands of all sweeps of which points have no result; empty if there are none."""
        commands = []
        for folder in self._folders:
            sweep, _, scale = folder.removeprefix(f"{self._paper}_").partition("-")
            ran, count = self.count(sweep, scale or None)
            if ran < count:
                commands.append(f"{sweep_command(folder)}   # {count - ran} of {count} points")
        return not_run(commands)

    def missing_points(self, needs: Iterable[Need[Kind]]) -> str:
        """Return a text with the missing points and the command that runs them; empty if none is missing."""
        return "; ".join(filter(None, map(self._missing_of, needs)))

    def _missing_of(self, need: Need[Kind]) -> str:
        rows = self.rows(need.sweep, need.keep, need.scale)
        gone = sum(not row.ran for row in rows)
        unfit = sum(row.ran and not row.ok for row in rows) if need.ok else 0
        counts = [f"{gone} of {len(rows)} points were not run"] * bool(gone)
        counts += [f"{unfit} of {len(rows)} points do not fit"] * bool(unfit)
        folder = f"{self._paper}_{need.sweep}" + (f"-{need.scale}" if need.scale else "")
        return f"{' and '.join(counts)}: {sweep_command(folder)}" if counts else ""


@functools.cache
def points_of(sweep: str, scale: str | None = None) -> tuple[Point, ...]:
    """The points of sweeps/SWEEP.yaml, at one of its scales."""
    return tuple(expand([f"+sweeps={sweep}", *([f"scale={scale}"] if scale else [])]))
