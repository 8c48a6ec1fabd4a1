"""All schemes compared: engine x planner x model on one cluster, from the sweep `schemes`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from analysis import dataframe, pack, records
from analysis.paper_pages import Missing, Picture
from analysis.plots.style import COLOURS, Source, panels, rows, styled
from analysis.records import Loaded, sweep_command
from analysis.report import MISSING, Section
from harness.core.record import RunRecord
from harness.core.units import percent, seconds, size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SWEEPS: dict[Source, str] = {"simulated": "schemes-paper", "measured": "schemes-local"}
"""Folders in runs/, by the source of their figures."""
COLUMNS = ("model", "engine", "planner", "samples/s", "step", "utilization", "fullest device", "predicted / measured")
KEYS = ("engine.schedule", "engine.zero")
"""Keys that distinguish points of one engine, in addition to the planner."""


def load(source: Source) -> Loaded:
    """The records of the sweep, "simulated" or "measured", committed and in runs/."""
    name = SWEEPS[source]
    folder = pack.RUNS / name
    return records.load([*pack.archives_of_sweeps([name]), *([folder] if folder.is_dir() else [])])


def _newest(loaded: Loaded) -> list[RunRecord]:
    return list(records.newest(loaded.records, records.point_of).values())


def section(source: Source) -> Section:
    """A line for each point that was run; one that cannot be says why, in its last cell."""
    loaded = load(source)
    newest = _newest(loaded)
    lines = tuple(sorted(_row(record, one) for record, one in zip(newest, _figures(newest), strict=True)))
    notes = () if source == "measured" else ("Predicted / measured: nothing was measured there.",)
    title = f"All schemes, {source} on cluster={_listed(newest, 'cluster', 'name')}"
    return Section(title, COLUMNS, lines, (*notes, *loaded.messages()), texts=3)


@styled
def figure(source: Source) -> Figure | None:
    """Throughput of every scheme that runs, a panel for each model."""
    newest = _newest(load(source))
    run = [(record, one) for record, one in zip(newest, _figures(newest), strict=True) if record.status == "ok"]
    if not run:
        return None
    speeds: dict[str, dict[str, float]] = {}
    for record, one in run:
        speeds.setdefault(one["model"], {})[_scheme(record, one)] = one["throughput"]
    drawn, axes = panels(1, len(speeds), 13, 1.4 + 0.27 * max(map(len, speeds.values())))
    for panel, model, colour in zip(axes[0], sorted(speeds), COLOURS, strict=False):
        own = dict(sorted(speeds[model].items(), key=lambda one: one[1]))
        rows(panel, [*own], [*own.values()], colour, source)
        panel.set(title=model, xlabel="throughput (samples/s)")
    run_records = [record for record, _ in run]
    where, batch = _listed(run_records, "cluster", "name"), _listed(run_records, "batch", "size")
    drawn.suptitle(f"All schemes (engine, planner), {source} on cluster={where}{f', batch {batch}' * bool(batch)}")
    return drawn


def picture(source: Source) -> Picture | Missing:
    """`figure`, as notebooks show it."""
    drawn = figure(source)
    return Picture.of(drawn) if drawn else Missing(SWEEPS[source], f"Not run yet: {sweep_command(SWEEPS[source])}")


def _figures(newest: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return each record's row of the tidy frame."""
    return [{str(key): value for key, value in row.items()} for row in dataframe.runs(newest).to_dict("records")]


def _scheme(record: RunRecord, one: dict[str, Any]) -> str:
    return f"{_engine(record)}, {one['planner']}"


def _engine(record: RunRecord) -> str:
    """The engine, and what else distinguishes its points."""
    values = dict(text.split("=", 1) for text in record.manifest.get("overrides", []))
    settings = [f"{key.partition('.')[2]}={values[key]}" for key in KEYS if key in values]
    return " ".join([values.get("engine", ""), *settings])


def _row(record: RunRecord, one: dict[str, Any]) -> tuple[str, ...]:
    names = (str(one["model"]), _engine(record), str(one["planner"]))
    if record.status != "ok":
        *_, why = record.reason.strip().splitlines()[:2] or [record.status]
        return (*names, *[MISSING] * 4, " ".join(why.split()))
    metrics = record.metrics
    ratio = (metrics.get("predicted_over_measured") or {}).get("step_time_s")
    return (
        *names,
        f"{metrics['throughput']:.1f}",
        seconds(metrics["step_time_s"]),
        percent(_number(one["utilization"])),
        size(_number(one["peak_memory_bytes"])),
        MISSING if ratio is None else f"{ratio:.2f}",
    )


def _listed(newest: Sequence[RunRecord], group: str, key: str) -> str:
    """All values of a key, as in "16, 64"."""
    found = {record.config[group][key] for record in newest if group in record.config}
    return ", ".join(map(str, sorted(found)))


def _number(value: Any) -> float | None:
    """None for what pandas has as NaN."""
    return value if isinstance(value, float | int) and value == value else None
