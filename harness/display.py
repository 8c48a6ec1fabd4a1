"""What a run shows on the terminal: its phases, a progress bar over its steps, the closing table, one summary line."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.status import Status
from rich.table import Table
from rich.text import Text

from harness.record import RunRecord

PLAIN_INTERVAL_S = 5.0
UNKNOWN = "-"
RATIO = "predicted / measured"


class Progress:
    """Phases and steps of one run. On a terminal they are live; elsewhere (a log file) they are occasional lines.

    with Progress() as progress:
        progress.phase("profiling", "unet, micro-batches of 2")
        progress.phase("planning")
        progress.steps(10)
        progress.step(1, loss=0.69, samples_per_s=120.0)
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self._live = self.console.is_terminal and not self.console.is_dumb_terminal
        self._name = ""
        self._began_s = 0.0
        self._status: Status | None = None
        self._bar: Bar | None = None
        self._total = 0
        self._printed_s = float("-inf")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(failed=kind is not None)

    def phase(self, name: str, detail: str = "") -> None:
        """Ends the phase (or the bar) before it and begins this one."""
        self._end()
        self._name, self._began_s = name, time.monotonic()
        text = f"{name}  {detail}" if detail else name
        if self._live:
            self._status = Status(Text(text), console=self.console, spinner="line")
            self._status.start()
        else:
            self.note(text)

    def steps(self, total: int) -> None:
        """Begins the bar over `total` training steps."""
        self._end()
        self._name, self._began_s, self._total, self._printed_s = "training", time.monotonic(), total, float("-inf")
        if self._live:
            self._bar = Bar(
                TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"),
                TimeRemainingColumn(), console=self.console, transient=True,
            )  # fmt: skip
            self._bar.add_task("", total=total)
            self._bar.start()

    def step(self, done: int, loss: float | None, samples_per_s: float | None) -> None:
        """`done` steps of the total have ended; the figures are those of the last one."""
        text = f"loss {_number(loss)}   {rate(samples_per_s)}"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, description=text)
            return
        now = time.monotonic()
        if not self._live and (done >= self._total or now - self._printed_s >= PLAIN_INTERVAL_S):
            self._printed_s = now
            self.note(f"step {done}/{self._total}   {text}")

    def note(self, text: str) -> None:
        """One line above whatever is live."""
        self.console.print(Text(text), soft_wrap=True)

    def _end(self, failed: bool = False) -> None:
        for live in (self._status, self._bar):
            if live is not None:
                live.stop()
        self._status = self._bar = None
        if self._name and (self._live or failed):
            self.note(f"{self._name}  {'failed after ' if failed else ''}{seconds(time.monotonic() - self._began_s)}")
        self._name = ""


def show(record: RunRecord, folder: Path, console: Console | None = None) -> None:
    """Print the closing table, where the run's files lie, and the summary line."""
    console = console or Console()
    console.print(closing_table(record))
    for text in files_of(record, folder):
        console.print(Text(text), soft_wrap=True)
    console.print(Text(summary_line(record, folder)), soft_wrap=True)


def closing_table(record: RunRecord) -> Group:
    """The whole run, then a row for each device; what was measured beside what was predicted. Null is a dash."""
    whole = Table(box=None, pad_edge=False)
    for title in ("", record.source, "predicted", RATIO):
        whole.add_column(title, justify="left" if not title else "right")
    for row in _whole_rows(record):
        whole.add_row(*map(Text, row))
    devices = Table(box=None, pad_edge=False)
    for title in ("device", "utilization", "bubble", "peak memory", "predicted", RATIO):
        devices.add_column(title, justify="right")
    for cells in _device_rows(record):
        devices.add_row(*map(Text, cells))
    return Group(*(part for table in (whole, devices) if table.row_count for part in (table, Text())))


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
    if "bubble_fraction" in m or "bubble_fraction" in p:
        yield "bubble", percent(m.get("bubble_fraction")), percent(p.get("bubble_fraction")), ""
    for key, (name, text) in _MEASURED_ONLY.items():
        if m.get(key) is not None:
            yield name, text(m[key]), "", ""
    for kind, sent in (m.get("bytes_sent") or {}).items():
        yield f"sent: {kind}", size(sent), "", ""


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


def files_of(record: RunRecord, folder: Path) -> list[str]:
    """Where the record, the trace and the picture lie: a line for each that is there."""
    names = {"record": "record.json", "trace": record.trace, "picture": "timeline.png", "log": "log"}
    places = {what: Path(folder) / name for what, name in names.items() if name}
    return [f"{what:<8} {_short(place)}" for what, place in places.items() if place.exists()]


def summary_line(record: RunRecord, folder: Path) -> str:
    """The run in one line: who, how it ended, how fast, where it lies."""
    who = " ".join(_name(record.config.get(group)) for group in ("engine", "model"))
    if record.status != "ok":
        reason = record.reason.strip().splitlines()
        parts = [record.status, *reason[:1]]
    else:
        m = record.metrics
        peaks = [peak for peak in m.get("peak_memory_bytes") or [] if peak is not None]
        parts = [
            "ok" if record.source == "measured" else f"ok ({record.source})",
            rate(m.get("throughput")),
            f"{seconds(m.get('step_time_s'))} a step",
            f"loss {_number(m.get('first_loss'))} -> {_number(m.get('loss'))}",
            f"bubble {percent(m.get('bubble_fraction'))}",
            f"peak {size(max(peaks, default=None))}",
        ]
    return f"{who}: {', '.join(parts)} ({_short(folder)})"


def size(count: float | None) -> str:
    """Bytes with a binary unit: 812.0 MiB."""
    if count is None:
        return UNKNOWN
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def seconds(value: float | None) -> str:
    """Seconds with a fitting unit: 85.0 us, 129.7 ms, 12.34 s."""
    if value is None:
        return UNKNOWN
    if 0 < value < 1e-3:
        return f"{value * 1e6:.1f} us"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


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


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.4f}"


def _at(values: Sequence[Any], index: int) -> Any:
    return values[index] if index < len(values) else None


def _name(node: Any) -> str:
    return str(node.get("name", UNKNOWN)) if isinstance(node, dict) else str(node or UNKNOWN)


def _short(path: Path) -> str:
    """The path as seen from here, where that is shorter."""
    return min(os.path.relpath(path), str(path), key=len)


_MEASURED_ONLY: dict[str, tuple[str, Callable[[float], str]]] = {
    "tokens_per_s": ("tokens", lambda value: rate(value, "tokens/s")),
    "first_loss": ("loss, first step", _number),
    "loss": ("loss, last step", _number),
    "model_flops_per_s": ("model FLOP/s", flops),
    "data_wait_s": ("wait for data", seconds),
}
