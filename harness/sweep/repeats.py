"""Points that differ only in their seed as one row: the mean and the spread over them.

    engine=gpipe seed=0   31.2 samples/s
    engine=gpipe seed=1   30.6 samples/s   ->   engine=gpipe   3 of 3 ok   31.0 +- 0.3 samples/s
    engine=gpipe seed=2   31.2 samples/s

The spread is the standard deviation of a sample (n - 1).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from harness.core.units import AT_MOST, UNKNOWN, number, rate, seconds, size
from harness.report import comparison
from harness.report.columns import Column, mesh_text
from harness.sweep.points import SEED
from harness.sweep.row import PREDICTED, UNIT, Row
from harness.sweep.table import BEST, decimal, differing, short, values_of

TITLE = "mean \N{PLUS-MINUS SIGN} standard deviation over the seeds"
Text = Callable[[float], str]
Group = Sequence[Row]


@dataclass(frozen=True)
class Summary:
    """The mean of some values, at least one, and their spread: 0 for a single one."""

    mean: float
    spread: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0)

    def shown(self, text: Text) -> str:
        """31.0 +- 0.3"""
        return f"{text(self.mean)} \N{PLUS-MINUS SIGN} {text(self.spread)}" if self.spread else text(self.mean)


def groups(rows: Sequence[Row]) -> list[list[Row]]:
    """The points by all but their seed, in order; none where no two differ in it alone."""
    found: dict[frozenset[tuple[str, str]], list[Row]] = {}
    for row in rows:
        found.setdefault(
            frozenset((key, value) for key, value in row.point.values().items() if key != SEED), []
        ).append(row)
    return [*found.values()] if any(len(group) > 1 for group in found.values()) else []


def columns(groups: Sequence[Group]) -> Iterator[Column]:
    """What differs but the seed, how many are ok, and the figures that some point has."""
    firsts = [group[0] for group in groups]
    keys = [key for key in differing(firsts) if key != SEED]
    cells = zip(*values_of(firsts, keys), strict=True)
    yield from (Column(title, list(values)) for title, values in zip(short(keys), cells, strict=True))
    yield Column("ok", [f"{sum(row.state == 'ok' for row in group)} of {len(group)}" for group in groups], figure=True)
    yield from (column for column in _figures(groups) if any(cell != UNKNOWN for cell in column.cells))


def _figures(groups: Sequence[Group]) -> Iterator[Column]:
    rows = [row for group in groups for row in group]
    speeds = comparison.speeds_over_single([row.record for row in rows])
    speed = {id(row): value for row, value in zip(rows, speeds, strict=True) if not row.is_reference}

    def named(name: str) -> Callable[[Row], float | None]:
        return lambda row: row.numbers()[name] if row.state == "ok" else None

    def column(title: str, value: Callable[[Row], float | None], text: Text, rank: int = 0) -> Column:
        return Column(title, [_cell(group, value, text) for group in groups], rank, figure=True)

    throughput = column(UNIT, named("throughput"), lambda value: rate(value, unit=""))
    marks = _best(groups, named("throughput"))
    cells = [
        f"{AT_MOST if any(row.is_bound for row in group) else ''}{cell}{mark}"
        for group, cell, mark in zip(groups, throughput.cells, marks, strict=True)
    ]
    yield Column(UNIT, cells, figure=True)
    yield column("step time", named("step_time_s"), seconds)
    yield column("memory", named("peak_memory_bytes"), size, 1)
    yield column("last\nloss", named("last_loss"), number, 4)
    yield column("speed /\nsingle", lambda row: speed.get(id(row)), decimal, 2)
    yield column("predicted\n/ measured", named("predicted_over_measured"), decimal, 3)
    yield Column("mesh", [mesh_text(_first(group).mesh) for group in groups], 5, figure=True)
    yield Column("micro-\nbatch", [str(_first(group).micro_batch_size or UNKNOWN) for group in groups], 6, figure=True)


def _cell(group: Group, value: Callable[[Row], float | None], text: Text) -> str:
    known = [one for row in group if (one := value(row)) is not None]
    mark = PREDICTED if any(row.predicts and row.record and row.record.source != "measured" for row in group) else ""
    return mark + Summary.of(known).shown(text) if known else UNKNOWN


def _best(groups: Sequence[Group], value: Callable[[Row], float | None]) -> list[str]:
    """A mark for the highest mean, where all are of one model."""
    means = [
        statistics.fmean(known) if (known := [one for row in group if (one := value(row))]) else 0.0 for group in groups
    ]
    if len({row.trained for group in groups for row in group if row.record}) > 1 or len(groups) < 2:
        return [""] * len(groups)
    return [f" {BEST}" if mean and mean == max(means) else "  " for mean in means]


def _first(group: Group) -> Row:
    """The first point that is ok, else the first one."""
    return next((row for row in group if row.state == "ok"), group[0])
