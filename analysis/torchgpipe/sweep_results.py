"""The rows of the paper's tables, and which records belong to them.

A row is a point of a sweep: of scale=paper for what is simulated, of scale=local for what is measured in small. The
order of the points in sweeps/torchgpipe_tableN.yaml is that of the names here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from analysis.match_records import Points, Row
from harness.core.record import RunRecord

Source = Literal["simulated", "measured"]
PIPELINES = ("Naive-1", "Pipeline-1", "Pipeline-2", "Pipeline-4", "Pipeline-8")
ROWS = {
    1: ("baseline", "dep-x-x", "dep-str-x", "dep-str-ptl"),
    2: tuple(f"n={n} m={m}" for n, m in itertools.product((2, 4, 8), (1, 4, 32))),
    3: PIPELINES,
    4: PIPELINES,
}
"""The rows of each table, as the paper calls them."""
SMALL = tuple(f"n={n} m={m}" for n, m in itertools.product((1, 2), (1, 4, 8)))
"""The rows of Table 2 in small, which are not the paper's: the points of scale=local of its sweep."""
SCALES: dict[int, tuple[str, ...]] = {
    1: ("paper", "local"),
    2: ("paper",),
    3: ("paper", "local"),
    4: ("paper", "local"),
}
"""The scales whose points are the rows of each table."""
SOURCE: dict[str, Source] = {"paper": "simulated", "local": "measured"}
PUBLIC: dict[str, tuple[str, ...]] = {
    "amoebanet_memory": ("paper", "local"),
    "resnet101_speed": ("paper", "local"),
    "resnet101_accuracy": ("paper",),
}
"""The sweeps of the benchmarks that are in the public documentation alone, and their scales."""
FOLDERS = [
    *(f"torchgpipe_table{table}-{scale}" for table, scale in itertools.product(ROWS, SOURCE)),
    *(f"torchgpipe_{name}-{scale}" for name, scales in PUBLIC.items() for scale in scales),
]
"""The sweeps, as they are called in runs/."""


@dataclass(frozen=True)
class Candidate:
    """A point of Table 3's search: does U-Net (B, C) fit on so many devices? `record` is None if it was not run."""

    row: str
    convs: int
    channels: int
    record: RunRecord | None


class Results(Points[Row]):
    """The records, by table, row and source."""

    def __init__(self, records: Iterable[RunRecord]) -> None:
        super().__init__("torchgpipe", Row, FOLDERS, records)

    def record(self, table: int, row: str, source: Source) -> RunRecord | None:
        scale = next((scale for scale in SCALES[table] if SOURCE[scale] == source), None)
        if scale is None:
            return None
        return self.rows(f"table{table}", scale=scale)[ROWS[table].index(row)].record

    def has_rows(self, table: int) -> bool:
        """Whether a row of the table has been run, well or not."""
        return any(self.record(table, row, SOURCE[scale]) for scale in SCALES[table] for row in ROWS[table])

    def metric(self, table: int, row: str, source: Source, name: str) -> Any:
        """A metric of a row's record; None where it is not known."""
        record = self.record(table, row, source)
        return record.metrics.get(name) if record and record.status == "ok" else None

    def small(self, row: str) -> RunRecord | None:
        """The record of a row of `SMALL`."""
        return self.rows("table2", scale="local")[SMALL.index(row)].record

    def search(self) -> list[Candidate]:
        """The candidates of Table 3's search, those that have not been run, too."""
        return [_candidate(row) for row in self.rows("table3", searched, "paper")]


def searched(row: Row) -> bool:
    """Whether a point of Table 3 is one of its search; the paper's own rows have given balances."""
    return row["planner"] != "given"


def _candidate(row: Row) -> Candidate:
    """U-Nets are called unet_B_C; keys may say otherwise."""
    _, convs, channels = row["model"].split("_")
    name = "Naive-1" if row["engine"] == "single" else f"Pipeline-{row['mesh.pipeline']}"
    return Candidate(name, int(row["model.convs"] or convs), int(row["model.channels"] or channels), row.record)
