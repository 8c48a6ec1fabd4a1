"""The end of a run on the terminal: the closing table, the paths of its files, one summary line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from harness.core.record import RunRecord
from harness.core.run_files import RECORD, TIMELINE
from harness.core.units import UNKNOWN, UPPER_BOUND, flops, number, percent, rate, ratio, seconds, size
from harness.report import run_notes, searched_order
from harness.report.console import plain

LOG_WIDTH = 160
RATIO = "predicted / measured"
LISTED = 0.01
"""The smallest part of a peak that is listed; the record has all."""


def console() -> Console:
    """Returns a console as wide as the terminal; wider for a log file."""
    terminal = plain()
    return terminal if terminal.is_terminal else plain(width=LOG_WIDTH)


def show(record: RunRecord, folder: Path, on: Console | None = None) -> None:
    """Prints the closing table, the basis of simulated numbers, the paths of the files, and the summary line."""
    on = on or console()
    on.print(closing_table(record))
    basis = basis_lines(record) if record.source != "measured" else _profile_line(record)
    above = [*run_notes.notes(record), *basis]
    for text in [*above, *[""] * bool(above), *file_lines(record, folder), summary_line(record, folder)]:
        on.print(Text(text), soft_wrap=True)


def closing_table(record: RunRecord) -> Group:
    """Returns a table of the whole run, then one with a row for each device. Null is a dash.

    Measured numbers are next to predicted ones; a simulated record is compared only, under jitter, with itself without
    jitter.
    """
    measured = record.source == "measured"
    titles = ["", record.source, "predicted" if measured else "without jitter", RATIO]
    shown = 4 if measured else 3 if _basis(record).get("jitter") else 2
    whole = _table(titles[:shown], (row[:shown] for row in _whole_rows(record)))
    columns = ["device", "utilization", "bubble", "peak memory", "predicted", RATIO, "reserved"]
    reserves = bool(record.metrics.get("reserved_memory_bytes"))
    wide = 7 if reserves else 6 if measured else 4
    devices = _table(columns[:wide], (row[:wide] for row in _device_rows(record)))
    fullest = _table(["device", "peak at", "with"], [] if measured else _moments(record))
    return Group(*(part for table in (whole, devices, fullest) if table.row_count for part in (table, Text())))


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Makes a table with texts to the left, numbers to the right."""
    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, justify="left" if title in ("", "with") else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _whole_rows(record: RunRecord) -> Iterator[tuple[str, str, str, str]]:
    """Yields (name, measured, predicted, ratio); a quantity that is unknown on both sides has no row, nor has a kind of
    message of which no byte was sent or predicted."""
    m, p = record.metrics, record.predicted
    step, expected, speed = m.get("step_time_s"), p.get("step_time_s"), m.get("throughput")
    if speed is not None:
        planned_speed = speed * step / expected if step and expected else None
        yield "throughput", _speed(record), rate(planned_speed), ratio(planned_speed, speed)
    if "step_time_s" in m or "step_time_s" in p:
        yield "step time", seconds(step), seconds(expected), ratio(expected, step)
    if m.get("step_time_spread_s"):
        yield "  p10 to p90", " to ".join(map(seconds, m["step_time_spread_s"])), "", ""
    yield from _part_rows(m, p)
    if m.get("period_s") is not None:
        period, planned_period = m["period_s"], p.get("period_s")
        yield "period, without filling", seconds(period), seconds(planned_period), ratio(planned_period, period)
    if "bubble_fraction" in m or "bubble_fraction" in p:
        yield "bubble", percent(m.get("bubble_fraction")), percent(p.get("bubble_fraction")), ""
    for key, (name, text) in _ALONE.items():
        if m.get(key) is not None:
            yield name, text(m[key]), "", ""
    if m.get("skipped_steps"):
        yield "steps without an update", str(m["skipped_steps"]), "", ""
    hardware = m.get("hardware_percent_of_peak")
    if hardware and hardware != m.get("percent_of_peak"):
        yield "  and with recomputation", percent(hardware / 100), "", ""
    if m.get("data_wait_s") is not None:
        share = m["data_wait_s"] / step if step else 0.0
        more = f" (+{percent(share)} of a step)" if share > WAITING else ""
        yield "wait for data", seconds(m["data_wait_s"]) + more, "", ""
    sent, planned, calls = m.get("bytes_sent") or {}, p.get("bytes_sent") or {}, m.get("collectives") or {}
    for kind in dict.fromkeys((*sent, *planned)):
        measured, predicted = sent.get(kind), planned.get(kind)
        if measured or predicted:
            often = f" in {calls[kind]} calls" if kind in calls else ""
            yield f"sent: {kind}{often}", size(measured), size(predicted), ratio(predicted, measured)


def _part_rows(m: Mapping[str, Any], p: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Yields what the devices' mean step consists of; ratios of parts above `PART` of it: the others are noise."""
    step, parts, planned = m.get("step_time_s"), m.get("parts_s") or {}, p.get("parts_s") or {}
    for name in dict.fromkeys((*parts, *planned)):
        part, expected = parts.get(name), planned.get(name)
        if part or expected:
            compared = ratio(expected, part) if part and part > PART * (step or 0.0) else ""
            yield f"  {name}", seconds(part), seconds(expected), compared


def _device_rows(record: RunRecord) -> Iterator[tuple[str, ...]]:
    busy = record.metrics.get("utilization") or []
    peak = record.metrics.get("peak_memory_bytes") or []
    expected = record.predicted.get("peak_memory_bytes") or []
    reserved = record.metrics.get("reserved_memory_bytes") or []
    count = max(len(busy), len(peak), len(expected))
    names = sorted({stage["device"] for stage in (record.plan or {}).get("stages", [])})
    if len(names) != count:
        names = list(range(count))
    for index, name in enumerate(names):
        used, most, planned = _at(busy, index), _at(peak, index), _at(expected, index)
        idle = None if used is None else 1 - used
        taken = size(_at(reserved, index))
        yield str(name), percent(used), percent(idle), size(most), size(planned), ratio(planned, most), taken


def _moments(record: RunRecord) -> Iterator[tuple[str, str, str]]:
    """Yields the time of each device's memory peak and its contents, the largest parts first."""
    for peak in record.metrics.get("peaks") or []:
        parts = sorted(peak["contents"].items(), key=lambda part: -part[1])
        large = [f"{name} {size(count)}" for name, count in parts if count >= LISTED * peak["bytes"]]
        yield str(peak["device"]), seconds(peak["at_s"]), ", ".join(large)


def basis_lines(record: RunRecord) -> list[str]:
    """Returns the basis of simulated numbers, a line each: layer times with a warning, cluster, jitter, the planner."""
    basis = _basis(record)
    measured = {key for key in record.metrics if key != "period_s"}  # the planner's period is listed in addition
    planned = [_figure(key, value) for key, value in record.predicted.items() if key not in {*measured, "search_gap"}]
    lines = {
        "layer times": basis.get("layer_times"),
        "profile": basis.get("profile"),
        "note": basis.get("note"),
        "cluster": basis and f"{basis['cluster']['name']}, {basis['values']} values{_changed(record)}",
        "jitter": basis.get("jitter") and f"{basis['jitter']:g}, seed {basis['seed']}",
        "schedule": _searched(record),
        "planner": ", ".join(filter(None, planned)),
    }
    return [f"{what:<12} {text}" for what, text in lines.items() if text]


def _profile_line(record: RunRecord) -> list[str]:
    """Returns the schedule that was searched, if one was, and the source of the profile on which the prediction is
    based."""
    lines = {"schedule": _searched(record), "profile": _basis(record).get("profile")}
    return [f"{what:<8} {text}" for what, text in lines.items() if text]


def _searched(record: RunRecord) -> str:
    stages = (record.plan or {}).get("stages", ())
    return searched_order.line(record.predicted, [stage["device"] for stage in stages])


def _basis(record: RunRecord) -> dict[str, Any]:
    basis: dict[str, Any] = record.manifest.get("simulation", {})
    return basis


def _changed(record: RunRecord) -> str:
    """Returns the user's overrides of the cluster, and the assumption about the ports of its nodes."""
    typed = [text for text in record.manifest.get("overrides", []) if text.startswith("cluster.")]
    cluster = record.config["cluster"]
    port_bandwidth = cluster["node_bandwidth_gb_s"]
    if cluster["values"] == "effective":
        port_bandwidth = port_bandwidth or cluster["effective"]["node_bandwidth_gb_s"]
    assumptions = f", with {' '.join(typed)}" if typed else ""
    if (cluster["nodes"] or 1) > 1 and not port_bandwidth:
        assumptions += "; network port of a node as fast as its links (cluster.node_bandwidth_gb_s is not set)"
    return assumptions


def _figure(key: str, value: Any) -> str:
    """Formats one of a planner's figures; lists are left out."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    name = key.rpartition("_")[0].replace("_", " ")
    if key.endswith("_s"):
        return f"{name} {seconds(value)}"
    return f"{name} {size(value)}" if key.endswith("_bytes") else f"{key.replace('_', ' ')} {value:.4g}"


def file_lines(record: RunRecord, folder: Path) -> list[str]:
    """Returns the paths of the record, the trace, the picture and the log: a line for each that exists."""
    names = {"record": RECORD, "trace": record.trace, "picture": TIMELINE, "log": "log"}
    places = {what: Path(folder) / name for what, name in names.items() if name}
    return [f"{what:<8} {_short(place)}" for what, place in places.items() if place.exists()]


def ending(record: RunRecord) -> str:
    """Returns the status; a run that was not executed says so: ok (simulated), ok (planned)."""
    if record.status != "ok" or record.source == "measured":
        return record.status
    return "ok (planned)" if record.config.get("mode") == "plan" else f"ok ({record.source})"


def summary_line(record: RunRecord, folder: Path) -> str:
    """Returns the run in one line: engine and model, status, speed, folder."""
    who = " ".join(_name(record.config.get(group)) for group in ("engine", "model"))
    if record.source == "simulated" and _basis(record).get("model"):
        who = f"{_name(record.config.get('engine'))} {_basis(record)['model']}"  # the profile's, whatever model= is
    if record.status != "ok":
        reason = record.reason.strip().splitlines()
        parts = [record.status, *reason[:1]]
    else:
        m = record.metrics
        peaks = [peak for peak in m.get("peak_memory_bytes") or [] if peak is not None]
        loss = f"loss {number(m.get('first_loss'))} -> {number(m.get('loss'))}"
        parts = [
            ending(record),
            _speed(record),
            f"{seconds(m.get('step_time_s'))} a step",
            *([loss] if record.source == "measured" else []),
            f"bubble {percent(m.get('bubble_fraction'))}",
            f"peak {size(max(peaks, default=None))}",
        ]
    return f"{who}: {', '.join(parts)} ({_short(folder)})"


def _speed(record: RunRecord) -> str:
    """Returns the throughput; of a simulation on a device that is not calibrated, with a word about it."""
    bound = record.source == "simulated" and _basis(record).get("upper_bound")
    return rate(record.metrics.get("throughput")) + (f" ({UPPER_BOUND})" if bound else "")


def _at(values: Sequence[Any], index: int) -> Any:
    return values[index] if index < len(values) else None


def _name(node: Any) -> str:
    return str(node.get("name", UNKNOWN)) if isinstance(node, dict) else str(node or UNKNOWN)


def _short(path: Path) -> str:
    """Returns the path relative to the working directory, where that is shorter."""
    return min(os.path.relpath(path), str(path), key=len)


PART = 0.005
"""Share of a step from which on a part of it is listed."""
WAITING = 0.02
"""Share of a step from which on waiting for data (which is not part of the step) is printed as such."""
_ALONE: dict[str, tuple[str, Callable[[float], str]]] = {
    "tokens_per_s": ("tokens", lambda value: rate(value, "tokens/s")),
    "tokens_per_s_per_device": ("  of each device", lambda value: rate(value, "tokens/s")),
    "first_loss": ("loss, first step", number),
    "loss": ("loss, last step", number),
    "model_flops_per_s": ("model FLOP/s", flops),
    "percent_of_peak": ("  of devices' peak (MFU)", lambda value: percent(value / 100)),
    "data_sheet_percent_of_peak": ("  of their data sheet's peak", lambda value: percent(value / 100)),
}
