"""The rows of the paper's tables, and which records belong to them.

A row is a point of a sweep: of scale=paper for what is simulated, of scale=local for what is measured in small. The
order of the points in sweeps/torchgpipe_tableN.yaml is that of the names here.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from omegaconf import OmegaConf

from analysis.records import newest
from harness.compose import compose
from harness.record import RunRecord
from harness.sweep_points import expand

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
DECISIVE = ("engine", "model", "mesh", "planner", "batch", "profile")
"""The keys that make a record one of a row; cluster, seed, tracker and the like do not."""


@dataclass(frozen=True)
class Candidate:
    """A point of Table 3's search: does U-Net (B, C) fit on so many devices? `record` is None if it was not run."""

    row: str
    convs: int
    channels: int
    record: RunRecord | None


class Results:
    """The records, by table, row and source."""

    def __init__(self, records: Iterable[RunRecord]) -> None:
        self._newest = newest(records, lambda record: (record.source, decisive(record.config)))

    def record(self, table: int, row: str, source: Source) -> RunRecord | None:
        scale = next((scale for scale in SCALES[table] if SOURCE[scale] == source), None)
        if scale is None:
            return None
        return self._newest.get((source, points(table, scale)[ROWS[table].index(row)]))

    def was_run(self, table: int) -> bool:
        """Whether a row of the table has been run, well or not."""
        return any(self.record(table, row, SOURCE[scale]) for scale in SCALES[table] for row in ROWS[table])

    def metric(self, table: int, row: str, source: Source, name: str) -> Any:
        """A metric of a row's record; None where it is not known."""
        record = self.record(table, row, source)
        return record.metrics.get(name) if record and record.status == "ok" else None

    def small(self, row: str) -> RunRecord | None:
        """The record of a row of `SMALL`."""
        return self._newest.get(("measured", points(2, "local")[SMALL.index(row)]))

    def search(self) -> list[Candidate]:
        """The candidates of Table 3's search, those that have not been run, too."""
        found = []
        for config, key in zip(configs(3, "paper"), points(3, "paper"), strict=True):
            if key in points(3, "paper")[: len(PIPELINES)]:
                continue  # the paper's own rows
            pipeline = config["engine"]["name"] != "single"
            row = f"Pipeline-{config['mesh']['pipeline']}" if pipeline else "Naive-1"
            model, record = config["model"], self._newest.get(("simulated", key))
            found.append(Candidate(row, model["convs"], model["channels"], record))
        return found


def decisive(config: dict[str, Any]) -> str:
    """What tells a configuration's row: equal texts, equal rows."""
    return repr(_sorted({key: config.get(key) for key in DECISIVE}))


@functools.cache
def configs(table: int, scale: str) -> tuple[dict[str, Any], ...]:
    """The composed configuration of each point of a table's sweep, in order."""
    points = expand([f"+sweeps=torchgpipe_table{table}", f"scale={scale}"])
    composed: Any = (OmegaConf.to_container(compose(point.overrides), resolve=True) for point in points)
    return tuple(composed)


@functools.cache
def points(table: int, scale: str) -> tuple[str, ...]:
    """`decisive` of each of `configs`."""
    return tuple(decisive(config) for config in configs(table, scale))


def _sorted(value: Any) -> Any:
    """Dictionaries in one order."""
    return {key: _sorted(value[key]) for key in sorted(value)} if isinstance(value, dict) else value
