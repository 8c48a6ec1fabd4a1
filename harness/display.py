"""What a run shows on the terminal when it has ended: the closing table, its files, one summary line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from harness.record import RunRecord
from harness.run_files import RECORD, TIMELINE

UNKNOWN = "-"
LOG_WIDTH = 160
RATIO = "predicted / measured"
LISTED = 0.01
"""The smallest part of a peak that is listed; the record has all."""


def console() -> Console:
    """As wide as the terminal; a log file has room."""
    found = Console()
    return found if found.is_terminal else Console(width=LOG_WIDTH)


def show(record: RunRecord, folder: Path, on: Console | None = None) -> None:
    """Print the closing table, what it rests on if it was not measured, where the files lie, and the summary line."""
    on = on or console()
    on.print(closing_table(record))
    basis = basis_of(record) if record.source != "measured" else _profile_of(record)
    for text in [*basis, *[""] * bool(basis), *files_of(record, folder), summary_line(record, folder)]:
        on.print(Text(text), soft_wrap=True)


def closing_table(record: RunRecord) -> Group:
    """The whole run, then a row for each device. Null is a dash.

    What was measured stands beside what was predicted; a simulated record has nothing to be compared with but, under
    jitter, itself without it.
    """
    measured = record.source == "measured"
    titles = ["", record.source, "predicted" if measured else "without jitter", RATIO]
    shown = 4 if measured else 3 if _basis(record).get("jitter") else 2
    whole = _table(titles[:shown], (row[:shown] for row in _whole_rows(record)))
    columns = ["device", "utilization", "bubble", "peak memory", "predicted", RATIO]
    devices = _table(columns[: 6 if measured else 4], (row[: 6 if measured else 4] for row in _device_rows(record)))
    fullest = _table(["device", "fullest at", "with"], [] if measured else _moments(record))
    return Group(*(part for table in (whole, devices, fullest) if table.row_count for part in (table, Text())))


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Texts to the left, numbers to the right."""
    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, justify="left" if title in ("", "with") else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _whole_rows(record: RunRecord) -> Iterator[tuple[str, str, str, str]]:
    """(name, measured, predicted, ratio); what is known on neither side has no row."""
    m, p = record.metrics, record.predicted
    if m.get("throughput") is not None:
        yield "throughput", rate(m["throughput"]), "", ""
    if "step_time_s" in m or "step_time_s" in p:
        step, expected = m.get("step_time_s"), p.get("step_time_s")
        yield "step time", seconds(step), seconds(expected), ratio(expected, step)
    if m.get("step_time_spread_s"):
        yield "  p10 to p90", " to ".join(map(seconds, m["step_time_spread_s"])), "", ""
    if m.get("period_s") is not None:
        period, expected = m["period_s"], p.get("period_s")
        yield "period, without filling", seconds(period), seconds(expected), ratio(expected, period)
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
        share = m["data_wait_s"] / m["step_time_s"] if m.get("step_time_s") else 0.0
        more = f" (+{percent(share)} of a step)" if share > WAITING else ""
        yield "wait for data", seconds(m["data_wait_s"]) + more, "", ""
    sent, planned = m.get("bytes_sent") or {}, p.get("bytes_sent") or {}
    for kind in dict.fromkeys((*sent, *planned)):
        one, other = sent.get(kind), planned.get(kind)
        yield f"sent: {kind}", size(one), size(other), ratio(other, one)


def _device_rows(record: RunRecord) -> Iterator[tuple[str, ...]]:
    busy = record.metrics.get("utilization") or []
    peak = record.metrics.get("peak_memory_bytes") or []
    expected = record.predicted.get("peak_memory_bytes") or []
    count = max(len(busy), len(peak), len(expected))
    names = sorted({stage["device"] for stage in (record.plan or {}).get("stages", [])})
    if len(names) != count:
        names = list(range(count))
    for index, name in enumerate(names):
        used, most, planned = _at(busy, index), _at(peak, index), _at(expected, index)
        idle = None if used is None else 1 - used
        yield str(name), percent(used), percent(idle), size(most), size(planned), ratio(planned, most)


def _moments(record: RunRecord) -> Iterator[tuple[str, str, str]]:
    """When each device is fullest, and of what: the largest parts first."""
    for peak in record.metrics.get("peaks") or []:
        parts = sorted(peak["contents"].items(), key=lambda part: -part[1])
        large = [f"{name} {size(count)}" for name, count in parts if count >= LISTED * peak["bytes"]]
        yield str(peak["device"]), seconds(peak["at_s"]), ", ".join(large)


def basis_of(record: RunRecord) -> list[str]:
    """What simulated numbers rest on, a line each: layer times and a warning of them, cluster, jitter, the planner."""
    basis = _basis(record)
    measured = {key for key in record.metrics if key != "period_s"}  # the planner's own stands beside it
    own = [_figure(key, value) for key, value in record.predicted.items() if key not in measured]
    lines = {
        "layer times": basis.get("layer_times"),
        "profile": basis.get("profile"),
        "note": basis.get("note"),
        "cluster": basis and f"{basis['cluster']['name']}, {basis['values']} values{_changed(record)}",
        "jitter": basis.get("jitter") and f"{basis['jitter']:g}, seed {basis['seed']}",
        "planner": ", ".join(filter(None, own)),
    }
    return [f"{what:<12} {text}" for what, text in lines.items() if text]


def _profile_of(record: RunRecord) -> list[str]:
    """Where the profile is from that the prediction rests on."""
    found = _basis(record).get("profile")
    return [f"profile  {found}"] if found else []


def _basis(record: RunRecord) -> dict[str, Any]:
    basis: dict[str, Any] = record.manifest.get("simulation", {})
    return basis


def _changed(record: RunRecord) -> str:
    """What the user changed of the cluster, as he typed it, and what is taken for the ports of its nodes."""
    typed = [text for text in record.manifest.get("overrides", []) if text.startswith("cluster.")]
    cluster = record.config["cluster"]
    given = cluster["node_bandwidth_gb_s"]
    if cluster["values"] == "effective":
        given = given or cluster["effective"]["node_bandwidth_gb_s"]
    told = f", with {' '.join(typed)}" if typed else ""
    if (cluster["nodes"] or 1) > 1 and not given:
        told += "; network port of a node as fast as its links (cluster.node_bandwidth_gb_s is not given)"
    return told


def _figure(key: str, value: Any) -> str:
    """One of a planner's figures; lists have no place in a line."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    name = key.rpartition("_")[0].replace("_", " ")
    if key.endswith("_s"):
        return f"{name} {seconds(value)}"
    return f"{name} {size(value)}" if key.endswith("_bytes") else f"{key.replace('_', ' ')} {value:.4g}"


def files_of(record: RunRecord, folder: Path) -> list[str]:
    """Where the record, the trace and the picture lie: a line for each that is there."""
    names = {"record": RECORD, "trace": record.trace, "picture": TIMELINE, "log": "log"}
    places = {what: Path(folder) / name for what, name in names.items() if name}
    return [f"{what:<8} {_short(place)}" for what, place in places.items() if place.exists()]


def ending(record: RunRecord) -> str:
    """How it ended; what is ok without having been run says so: ok (simulated), ok (planned)."""
    if record.status != "ok" or record.source == "measured":
        return record.status
    return "ok (planned)" if record.config.get("mode") == "plan" else f"ok ({record.source})"


def summary_line(record: RunRecord, folder: Path) -> str:
    """The run in one line: who, how it ended, how fast, where it lies."""
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
            rate(m.get("throughput")),
            f"{seconds(m.get('step_time_s'))} a step",
            *([loss] if record.source == "measured" else []),
            f"bubble {percent(m.get('bubble_fraction'))}",
            f"peak {size(max(peaks, default=None))}",
        ]
    return f"{who}: {', '.join(parts)} ({_short(folder)})"


def size(count: float | None, digits: int = 1) -> str:
    """Bytes with a binary unit: 812.0 MiB."""
    if count is None:
        return UNKNOWN
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.{digits}f} {unit}"
        count /= 1024
    return f"{count:.{digits}f} TiB"


def sizes(one: int, other: int) -> tuple[str, str]:
    """Two different numbers of bytes, with as many digits as it takes to tell them apart, at last in whole bytes."""
    for digits in (1, 2, 3):
        if size(one, digits) != size(other, digits):
            return size(one, digits), size(other, digits)
    return f"{one} B", f"{other} B"


def seconds(value: float | None) -> str:
    """Seconds with a fitting unit: 85.0 us, 129.7 ms, 12.34 s."""
    if value is None:
        return UNKNOWN
    if 0 < value < 1e-3:
        return f"{value * 1e6:.1f} us"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def age(value: float) -> str:
    """Seconds that have passed, roughly: 40 s, 3 min, 5 h, 12 d."""
    for unit, length in (("s", 60), ("min", 60), ("h", 24)):
        if value < length:
            return f"{value:.0f} {unit}"
        value /= length
    return f"{value:.0f} d"


def rate(value: float | None, unit: str = "samples/s") -> str:
    """A number for each second, four digits: 123.4 samples/s."""
    return UNKNOWN if value is None else f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.4g} {unit}"


def flops(value: float) -> str:
    """FLOP/s with a decimal unit: 12.3 GFLOP/s."""
    for unit in ("", "k", "M", "G", "T"):
        if value < 1000:
            return f"{value:.1f} {unit}FLOP/s"
        value /= 1000
    return f"{value:.1f} PFLOP/s"


def percent(fraction: float | None) -> str:
    return UNKNOWN if fraction is None else f"{100 * fraction:.0f} %"


def ratio(predicted: float | None, measured: float | None) -> str:
    """predicted / measured; "-" where one of them is not known or nothing was measured."""
    return UNKNOWN if predicted is None or not measured else f"{predicted / measured:.2f}"


def number(value: float | None) -> str:
    """A loss."""
    return UNKNOWN if value is None else f"{value:.4f}"


def _at(values: Sequence[Any], index: int) -> Any:
    return values[index] if index < len(values) else None


def _name(node: Any) -> str:
    return str(node.get("name", UNKNOWN)) if isinstance(node, dict) else str(node or UNKNOWN)


def _short(path: Path) -> str:
    """The path as seen from here, where that is shorter."""
    return min(os.path.relpath(path), str(path), key=len)


WAITING = 0.02
"""From this share of a step on, waiting for data (which is no part of it) is told as such."""
_ALONE: dict[str, tuple[str, Callable[[float], str]]] = {
    "tokens_per_s": ("tokens", lambda value: rate(value, "tokens/s")),
    "first_loss": ("loss, first step", number),
    "loss": ("loss, last step", number),
    "model_flops_per_s": ("model FLOP/s", flops),
    "percent_of_peak": ("  of the devices' peak", lambda value: percent(value / 100)),
}
