"""Records as tidy pandas frames: one row a run, or one a device of a run.

What was measured, simulated and planned stands in the same columns; `source` tells which, so no figure goes without it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Any

import pandas

from analysis.beside import ORIGIN
from harness.mesh import Mesh
from harness.record import RunRecord

GROUPS = ("engine", "planner", "model", "cluster")
POINT = ("sweep", "point", "id", "status", "source", *GROUPS)
SETTINGS = ("data", "pipeline", "tensor", "devices", "batch", "micro_batches", "precision")
FIGURES = ("throughput", "step_time_s", "utilization", "bubble", "peak_memory_bytes")
PREDICTED = ("predicted_step_time_s", "predicted_peak_memory_bytes", "predicted_over_measured")
COLUMNS = (*POINT, *SETTINGS, *FIGURES, *PREDICTED)
"""Before bytes_KIND, one column for each kind that was sent, `time` (of the start, UTC) and `origin`."""
BY_DEVICE = ("utilization", "peak_memory_bytes")
PLANNED, MEASURED = "planned", "measured"
SOURCES = {"plan": PLANNED, "run": MEASURED, "calibrate": MEASURED}
"""By mode; the others have the record's own."""


def runs(records: Iterable[RunRecord]) -> pandas.DataFrame:
    """One row a run. Utilization is the mean over devices, memory that of the fullest one."""
    rows = [_row(record) for record in records]
    kinds = sorted({key for row in rows for key in row if key.startswith("bytes_")})
    found = pandas.DataFrame(rows, columns=[*COLUMNS, *kinds, "time", ORIGIN])
    found = found.astype(dict.fromkeys((*FIGURES, *PREDICTED, *kinds), float))
    return found.assign(time=pandas.to_datetime(found["time"], utc=True, errors="coerce", format="ISO8601"))


def devices(records: Iterable[RunRecord]) -> pandas.DataFrame:
    """One row a device of a run, with what tells the run."""
    rows = []
    for record in records:
        run, predicted = _point(record), _listed(record.predicted, "peak_memory_bytes")
        columns = [_listed(_metrics(record), name) for name in BY_DEVICE]
        for number in range(max(map(len, (*columns, predicted)))):
            figures = zip((*BY_DEVICE, PREDICTED[1]), (*columns, predicted), strict=True)
            rows.append(run | {"device": number} | {name: _at(column, number) for name, column in figures})
    return pandas.DataFrame(rows, columns=[*POINT, "device", *BY_DEVICE, PREDICTED[1]])


def source(record: RunRecord) -> str:
    """measured, simulated or planned."""
    return SOURCES.get(record.config.get("mode", ""), record.source)


def _row(record: RunRecord) -> dict[str, Any]:
    metrics, predicted = _metrics(record), record.predicted
    sent = metrics.get("bytes_sent") or {}
    return (
        _point(record)
        | _settings(record)
        | {name: metrics.get(name) for name in ("throughput", "step_time_s")}
        | {"utilization": _of(statistics.fmean, metrics, "utilization"), "bubble": metrics.get("bubble_fraction")}
        | {"peak_memory_bytes": _of(max, metrics, "peak_memory_bytes")}
        | {"predicted_step_time_s": predicted.get("step_time_s")}
        | {"predicted_peak_memory_bytes": _of(max, predicted, "peak_memory_bytes")}
        | {"predicted_over_measured": (metrics.get("predicted_over_measured") or {}).get("step_time_s")}
        | {f"bytes_{kind}": size for kind, size in sent.items()}
        | {"time": record.manifest.get("start_time"), ORIGIN: record.manifest.get(ORIGIN)}
    )


def _point(record: RunRecord) -> dict[str, Any]:
    """What tells a run: its sweep and point by its folder, and what was chosen of each group."""
    folder = PurePath(record.config.get("out") or record.manifest.get(ORIGIN, ""))
    overrides = dict(text.partition("=")[::2] for text in record.manifest.get("overrides", []))
    chosen = {group: overrides.get(group) or _name(record, group) for group in GROUPS}
    own = (folder.parent.name, folder.name, record.id, record.status, source(record), *chosen.values())
    return dict(zip(POINT, own, strict=True))


def _settings(record: RunRecord) -> dict[str, Any]:
    plan, batch = record.plan or {}, record.config.get("batch") or {}
    mesh = plan.get("mesh") or {}
    degrees = {name: mesh.get(name) for name in ("data", "pipeline", "tensor")}
    count = Mesh(**mesh).size if mesh else None
    own = (*degrees.values(), count, batch.get("size"), batch.get("micro_batches"),
           (record.config.get("precision") or {}).get("dtype"))  # fmt: skip
    return dict(zip(SETTINGS, own, strict=True))


def _metrics(record: RunRecord) -> dict[str, Any]:
    """Those of the record; of a plan, which has none, what it predicts."""
    return record.predicted if source(record) == PLANNED else record.metrics


def _name(record: RunRecord, group: str) -> Any:
    """What the configuration says; a stored profile has a model of its own."""
    if group == "model" and record.config.get("profile"):
        return record.manifest.get("simulation", {}).get("model")
    return (record.config.get(group) or {}).get("name")


def _listed(figures: dict[str, Any], name: str) -> Sequence[float]:
    found = figures.get(name) or ()
    return found if isinstance(found, (list, tuple)) else (found,)


def _of(summary: Any, figures: dict[str, Any], name: str) -> float | None:
    known = [value for value in _listed(figures, name) if value is not None]
    return summary(known) if known else None


def _at(column: Sequence[float], number: int) -> float | None:
    return column[number] if number < len(column) else None
