"""Records as tidy pandas frames: one row a run, or one a device of a run.

Measured, simulated and planned figures have the same columns; the column `source` says which they are.
Each key that a record's overrides give (optimizer.lr, engine.checkpoint) is a column of all rows, with the value that
the run's configuration has, overridden or not; None where it has no such key. A key whose name another column has is
"chosen.KEY" (chosen.precision); those of `GROUPS` have their columns anyway.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import pandas

from analysis.records import key_of
from analysis.run_artifacts import ORIGIN
from harness.core.record import RunRecord
from harness.report import comparison

GROUPS = ("engine", "planner", "model", "cluster")
POINT = ("sweep", "point", "id", "status", "source", *GROUPS)
MESH = ("data_parallel_size", "pipeline_parallel_size", "tensor_parallel_size")
SETTINGS = (*MESH, "devices", "batch", "micro_batches", "micro_batch_size", "precision")
FIGURES = ("throughput", "step_time_s", "utilization", "bubble", "peak_memory_bytes", "first_loss", "last_loss")
SEED = "seed"
OVER_SINGLE = "speed_over_single"
PREDICTED = ("predicted_step_time_s", "predicted_peak_memory_bytes", "predicted_over_measured")
COLUMNS = (*POINT, *SETTINGS, *FIGURES, OVER_SINGLE, *PREDICTED)
"""Before the keys that were given, bytes_KIND, one column for each kind that was sent, and `LAST`."""
LAST = ("time", ORIGIN)
"""Columns at the end: the start of the run (UTC), and the source of its record."""
BY_DEVICE = ("utilization", "peak_memory_bytes")
PLANNED, MEASURED = "planned", "measured"
SOURCES = {"plan": PLANNED, "run": MEASURED, "calibrate": MEASURED}
"""Source of a record by mode; other modes have the record's own."""


def runs(records: Iterable[RunRecord]) -> pandas.DataFrame:
    """One row a run. Utilization is the mean over devices, memory that of the fullest one.

    `OVER_SINGLE` is the throughput / that of the run with engine=single in the same sweep (`speeds_over_single`), both
    measured or both simulated.
    """
    records = list(records)
    keys = _given(records)
    speeds = comparison.speeds_over_single(records, [str(_folder(record).parent) for record in records])
    rows = [
        _row(record) | _values(record, keys) | {OVER_SINGLE: speed}
        for record, speed in zip(records, speeds, strict=True)
    ]
    kinds = sorted({key for row in rows for key in row if key.startswith("bytes_")})
    frame = pandas.DataFrame(rows, columns=[*COLUMNS, *keys.values(), *kinds, *LAST])
    frame = frame.astype(dict.fromkeys((*FIGURES, OVER_SINGLE, *PREDICTED, *kinds), float))
    return frame.assign(time=pandas.to_datetime(frame["time"], utc=True, errors="coerce", format="ISO8601"))


def over_seeds(frame: pandas.DataFrame) -> pandas.DataFrame:
    """One row for the runs of a frame of `runs` that are ok and differ only in their seed, as of `repeats=5`.

    Each figure is the mean over them, `FIGURE_std` their standard deviation (n - 1; 0 of one), `seeds` their number.
    """
    figures = [name for name in (*FIGURES, OVER_SINGLE, *PREDICTED) if frame[name].notna().any()]
    apart = {"point", "id", SEED, *FIGURES, OVER_SINGLE, *PREDICTED, *LAST}
    keys = [name for name in frame.columns if name not in apart and not name.startswith("bytes_")]
    groups = frame[frame["status"] == "ok"].groupby(keys, dropna=False, sort=False)
    means, spreads = groups[figures].mean(), groups[figures].std().fillna(0.0).add_suffix("_std")
    return pandas.concat([groups.size().rename("seeds"), means, spreads], axis=1).reset_index()


def devices(records: Iterable[RunRecord]) -> pandas.DataFrame:
    """One row for each device of a run, with the columns that identify the run."""
    records = list(records)
    keys, rows = _given(records), []
    for record in records:
        run, predicted = _point(record) | _values(record, keys), _listed(record.predicted, "peak_memory_bytes")
        columns = [_listed(_metrics(record), name) for name in BY_DEVICE]
        for number in range(max(map(len, (*columns, predicted)))):
            figures = zip((*BY_DEVICE, PREDICTED[1]), (*columns, predicted), strict=True)
            rows.append(run | {"device": number} | {name: _at(column, number) for name, column in figures})
    return pandas.DataFrame(rows, columns=[*POINT, *keys.values(), "device", *BY_DEVICE, PREDICTED[1]])


def source(record: RunRecord) -> str:
    """measured, simulated or planned."""
    return SOURCES.get(record.config.get("mode", ""), record.source)


def _given(records: Sequence[RunRecord]) -> dict[str, str]:
    """The keys that any record's overrides give, in order of appearance, each with its column's name."""
    texts = dict.fromkeys(text for record in records for text in record.manifest.get("overrides", []))
    of_point = key_of(texts)
    keys = dict.fromkeys(
        text.lstrip("+").partition("=")[0] for text in texts if text in of_point and not text.startswith("~")
    )
    taken = {*COLUMNS, *LAST}
    return {key: f"chosen.{key}" if key in taken else key for key in keys if key not in GROUPS}


def _values(record: RunRecord, keys: Mapping[str, str]) -> dict[str, Any]:
    """Return the record's values of the keys, by column."""
    overrides = _overrides(record)
    return {column: _value(record, key, overrides.get(key)) for key, column in keys.items()}


def _value(record: RunRecord, key: str, given: str | None) -> Any:
    """A number, a truth value or a text: a list as JSON, of a group what was chosen."""
    values: Any = record.config
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    if isinstance(values, dict):
        return given or values.get("name")
    return json.dumps(values) if isinstance(values, list) else given if values is None else values


def _overrides(record: RunRecord) -> dict[str, str]:
    pairs = (text.partition("=") for text in record.manifest.get("overrides", []))
    return {key.lstrip("+"): value for key, _, value in pairs}


def _row(record: RunRecord) -> dict[str, Any]:
    metrics, predicted = _metrics(record), record.predicted
    sent = metrics.get("bytes_sent") or {}
    return (
        _point(record)
        | _settings(record)
        | {name: metrics.get(name) for name in ("throughput", "step_time_s")}
        | {"utilization": _of(statistics.fmean, metrics, "utilization"), "bubble": metrics.get("bubble_fraction")}
        | {"peak_memory_bytes": _of(max, metrics, "peak_memory_bytes")}
        | dict(zip(("first_loss", "last_loss"), comparison.losses(record), strict=True))
        | {"predicted_step_time_s": predicted.get("step_time_s")}
        | {"predicted_peak_memory_bytes": _of(max, predicted, "peak_memory_bytes")}
        | {"predicted_over_measured": comparison.predicted_over_measured(record)}
        | {f"bytes_{kind}": size for kind, size in sent.items()}
        | dict(zip(LAST, (record.manifest.get("start_time"), record.manifest.get(ORIGIN)), strict=True))
    )


def _point(record: RunRecord) -> dict[str, Any]:
    """The columns that identify a run: its sweep and point by its folder, and its choice in each group."""
    folder, overrides = _folder(record), _overrides(record)
    chosen = {group: overrides.get(group) or _name(record, group) for group in GROUPS}
    own = (folder.parent.name, folder.name, record.id, record.status, source(record), *chosen.values())
    return dict(zip(POINT, own, strict=True))


def _folder(record: RunRecord) -> PurePath:
    return PurePath(record.config.get("out") or record.manifest.get(ORIGIN, ""))


def _settings(record: RunRecord) -> dict[str, Any]:
    mesh, batch = comparison.mesh(record), record.config.get("batch") or {}
    own = (
        *((mesh.data, mesh.pipeline, mesh.tensor, mesh.size) if mesh else [None] * 4),
        batch.get("size"),
        batch.get("micro_batches"),
        comparison.micro_batch_size(record),
        (record.config.get("precision") or {}).get("dtype"),
    )
    return dict(zip(SETTINGS, own, strict=True))


def _metrics(record: RunRecord) -> dict[str, Any]:
    """Return the metrics of the record; for a plan, which has none, its predictions."""
    return record.predicted if source(record) == PLANNED else record.metrics


def _name(record: RunRecord, group: str) -> Any:
    """Return the name in the configuration; a stored profile has a model of its own."""
    if group == "model" and record.config.get("profile"):
        return record.manifest.get("simulation", {}).get("model")
    return (record.config.get(group) or {}).get("name")


def _listed(figures: dict[str, Any], name: str) -> Sequence[float]:
    value = figures.get(name) or ()
    return value if isinstance(value, (list, tuple)) else (value,)


def _of(summary: Any, figures: dict[str, Any], name: str) -> float | None:
    known = [value for value in _listed(figures, name) if value is not None]
    return summary(known) if known else None


def _at(column: Sequence[float], number: int) -> float | None:
    return column[number] if number < len(column) else None
