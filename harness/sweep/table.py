"""The table of a sweep, on the terminal and as CSV."""

from __future__ import annotations

import csv
import io
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from harness.checks.micro_batches import SIZE
from harness.core.units import UNKNOWN
from harness.report import comparison
from harness.report.columns import Column, drawn, mesh_text
from harness.report.console import plain
from harness.sweep.row import FIGURES, FURTHER, UNIT, Row

LOG_WIDTH = 160
BEST = "*"
MESH = "mesh"
REPEATED = ("mesh.pipeline", "mesh.data", "mesh.tensor", "batch.micro_batches")
"""Keys that are shown in other columns, too, and the rank of theirs."""
REPEATS = 10


def console_of_sweep() -> Console:
    """Return a console as wide as the terminal. It keeps this stdout while a point's own goes to a file."""
    console = plain(sys.stdout)
    return console if console.is_terminal else plain(sys.stdout, LOG_WIDTH)


def differing(rows: Sequence[Row]) -> list[str]:
    """The keys in which the points differ, in order of appearance; not the size of micro-batches where a sweep has made
    it the same (`harness.sweep.equal_micro_batches`), which has a column of its own."""
    values = [row.point.values() for row in rows]
    keys = dict.fromkeys(key for point in values for key in point)
    made_equal = SIZE in keys and not all(SIZE in point for point in values)
    return [key for key in keys if len({point.get(key) for point in values}) > 1 and not (key == SIZE and made_equal)]


def table(rows: Sequence[Row], width: int) -> tuple[Table, list[str]]:
    """A row for each point: id, what differs, status, figures. And the names of the columns that `width` leaves out."""
    columns = [
        Column("id", [row.point.id for row in rows]),
        *_differing_columns(rows),
        Column("status", [row.status for row in rows]),
        *_figure_columns(rows),
    ]
    return drawn(columns, width)


def _differing_columns(rows: Sequence[Row]) -> list[Column]:
    """Those that mesh and size of micro-batches repeat are the first to be left out, where these are known of all."""
    keys = differing(rows)
    ranks = [REPEATS if key in REPEATED and all(row.mesh for row in rows) else 0 for key in keys]
    columns = zip(short(keys), zip(*values_of(rows, keys), strict=True), ranks, strict=True)
    return [Column(title, list(cells), rank) for title, cells, rank in columns]


def _figure_columns(rows: Sequence[Row]) -> Iterator[Column]:
    """Speed, step time and memory; all others where some point has something to show."""
    leading, figures = best(rows), [row.figures(unit="") for row in rows]
    marks = ["" if not leading else f" {BEST}" if row in leading else "  " for row in rows]
    yield Column(UNIT, [speed + mark for (speed, _, _), mark in zip(figures, marks, strict=True)], figure=True)
    yield Column("step time", [step for _, step, _ in figures], figure=True)
    yield Column("memory", [memory for *_, memory in figures], rank=1, figure=True)
    extents = [row.extent() for row in rows]
    further = [
        Column("loss", [row.losses for row in rows], rank=6, figure=True),
        Column("speed /\nsingle", _over_single(rows), rank=2, figure=True),
        Column("predicted\n/ measured", [decimal(row.predicted_over_measured) for row in rows], rank=3, figure=True),
        *_sizes(rows),
        Column("bubble", [bubble for bubble, _ in extents], rank=7, figure=True),
        Column("period", [period for _, period in extents], rank=8, figure=True),
    ]
    yield from (column for column in further if any(cell != UNKNOWN for cell in column.cells))


def _over_single(rows: Sequence[Row]) -> list[str]:
    """The speed of each point over its reference's; nothing where there are only references."""
    speeds = comparison.speeds_over_single([row.record for row in rows])
    compared = [speed for row, speed in zip(rows, speeds, strict=True) if speed and not row.is_reference]
    return [decimal(speed) if compared else UNKNOWN for speed in speeds]


def _sizes(rows: Sequence[Row]) -> Iterator[Column]:
    """The mesh where it is more than one device, else the number of devices."""
    several = several_devices(rows)
    if several:
        yield Column(MESH, [mesh_text(row.mesh) for row in rows], rank=4, figure=True)
    yield Column("micro-\nbatch", [str(row.micro_batch_size or UNKNOWN) for row in rows], rank=5, figure=True)
    if not several:
        yield Column("devices", [str(row.devices or UNKNOWN) for row in rows], rank=9, figure=True)


def several_devices(rows: Sequence[Row]) -> bool:
    return any(row.mesh is not None and row.mesh.size > 1 for row in rows)


def decimal(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}"


def best(rows: Sequence[Row]) -> list[Row]:
    """The points of the highest throughput of those that are ok, for each model of which there are several."""
    models: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.throughput is not None:
            models[row.trained].append(row)
    several = [ended for ended in models.values() if len(ended) > 1]
    highest = [max(row.throughput or 0.0 for row in ended) for ended in several]
    return [row for ended, most in zip(several, highest, strict=True) for row in ended if row.throughput == most]


def values_of(rows: Sequence[Row], keys: Sequence[str]) -> list[list[str]]:
    """The values of `keys` in each row; of a path only the last part, if that is enough. Of a key that a point does not
    give what its run used."""
    columns = []
    for key in keys:
        whole = [row.point.values().get(key) or row.used(key) for row in rows]
        lasts = [value.rstrip("}'\"").rpartition("/")[2] for value in whole]
        columns.append(lasts if len(set(lasts)) == len(set(whole)) else whole)
    return [list(cells) for cells in zip(*columns, strict=True)] or [[] for _ in rows]


def short(keys: Sequence[str]) -> list[str]:
    """micro_batches for batch.micro_batches, where no other key ends like it."""
    lasts = [key.rpartition(".")[2] for key in keys]
    return [last if lasts.count(last) == 1 else key for key, last in zip(keys, lasts, strict=True)]


def as_csv(rows: Sequence[Row]) -> str:
    """A line for each point, nothing shortened: id, every key that differs, status, source, and all figures."""
    keys, speeds = differing(rows), comparison.speeds_over_single([row.record for row in rows])
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["id", *keys, "status", "source", *FIGURES, *FURTHER, "speed_over_single"])
    for row, speed in zip(rows, speeds, strict=True):
        values, numbers = row.point.values(), row.numbers()
        ended = (row.state, row.record.source if row.record else "")
        figures = (numbers[name] for name in (*FIGURES, *FURTHER))
        writer.writerow([row.point.id, *(values.get(key, "") for key in keys), *ended, *figures, speed])
    return text.getvalue()
