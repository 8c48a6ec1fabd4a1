"""What a sweep shows: a table of its points, live on a terminal; a line for each point elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from harness.display import UNKNOWN, rate, seconds, size
from harness.record import RunRecord
from harness.sweep_points import Point

REASON_LINES = 8
LOG_WIDTH = 160


@dataclass
class Row:
    """One point: waiting without `began_s`, running without `record`. `before` if an earlier start finished it."""

    point: Point
    began_s: float | None = None
    record: RunRecord | None = None
    before: bool = False

    @property
    def status(self) -> str:
        if self.record is not None:
            return f"{self.record.status}, before" if self.before else self.record.status
        return "-" if self.began_s is None else f"running {time.monotonic() - self.began_s:.0f} s"

    def figures(self) -> tuple[str, str, str]:
        """Throughput, step time, memory of the fullest device; "~" marks a prediction."""
        if self.record is None:
            return UNKNOWN, UNKNOWN, UNKNOWN
        measured, predicted = self.record.metrics, self.record.predicted
        step, expected = measured.get("step_time_s"), predicted.get("step_time_s")
        peaks, planned = measured.get("peak_memory_bytes"), predicted.get("peak_memory_bytes")
        return (
            rate(measured.get("throughput")),
            f"~{seconds(expected)}" if step is None and expected is not None else seconds(step),
            size(max(peaks)) if peaks else f"~{size(max(planned))}" if planned else UNKNOWN,
        )


class Display:
    """Live on a terminal; elsewhere (a log file) a line for each point that has ended."""

    def __init__(self, rows: Sequence[Row], console: Console | None = None) -> None:
        self.rows = rows
        self.console = console or console_of_sweep()
        live = self.console.is_terminal and not self.console.is_dumb_terminal
        self._live = Live(console=self.console, auto_refresh=False, transient=True) if live else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def refresh(self) -> None:
        """Show how things stand; cheap, to be called while a point runs."""
        if self._live:
            self._live.update(table(self.rows), refresh=True)

    def ended(self, row: Row) -> None:
        """One more point has its record."""
        self.refresh()
        if not self._live:
            number = self.rows.index(row) + 1
            varied = " ".join(f"{key}={row.point.values().get(key, UNKNOWN)}" for key in differing(self.rows))
            figures = [text for text in row.figures() if text != UNKNOWN]
            parts = [f"[{number}/{len(self.rows)}] {row.point.id}", varied, row.status, *figures]
            self.console.print(Text("  ".join(part for part in parts if part)), soft_wrap=True)


def console_of_sweep() -> Console:
    """As wide as the terminal; a log file has room. It stays with this stdout while a point's own goes to a file."""
    console = Console(file=sys.stdout)
    return console if console.is_terminal else Console(file=sys.stdout, width=LOG_WIDTH)


def differing(rows: Sequence[Row]) -> list[str]:
    """The keys in which the points differ, in order of appearance."""
    values = [row.point.values() for row in rows]
    keys = dict.fromkeys(key for point in values for key in point)
    return [key for key in keys if len({point.get(key) for point in values}) > 1]


def table(rows: Sequence[Row]) -> Table:
    """A row for each point: id, what differs, status, throughput, step time, memory."""
    shown = Table(box=None, pad_edge=False)
    keys = differing(rows)
    for title in ("id", *_short(keys), "status"):
        shown.add_column(Text(title), overflow="fold")
    for title in ("throughput", "step time", "memory"):
        shown.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        values = row.point.values()
        cells = [row.point.id, *(values.get(key, UNKNOWN) for key in keys), row.status, *row.figures()]
        shown.add_row(*map(Text, cells))
    return shown


def _short(keys: Sequence[str]) -> list[str]:
    """micro_batches for batch.micro_batches, where no other key ends like it."""
    lasts = [key.rpartition(".")[2] for key in keys]
    return [last if lasts.count(last) == 1 else key for key, last in zip(keys, lasts, strict=True)]


def close(rows: Sequence[Row], folder: Path, console: Console | None = None) -> None:
    """Print the closing table, why points failed, and one line about the whole sweep."""
    console = console or console_of_sweep()
    console.print(table(rows))
    for row in rows:
        if row.record is not None and row.record.status != "ok":
            lines = row.record.reason.strip().splitlines()[:REASON_LINES]
            console.print(Text("\n  ".join([f"{row.point.id} {row.record.status}", *lines])), soft_wrap=True)
    console.print(Text(f"{summary(rows)} ({folder})"), soft_wrap=True)


def summary(rows: Sequence[Row]) -> str:
    """6 points: 4 ok, 1 oom, 1 not run; 2 of them done before"""
    states = [row.record.status if row.record else "not run" for row in rows]
    counts = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states), key=lambda s: (s != "ok", s)))
    before = sum(row.before for row in rows)
    return f"{len(rows)} points: {counts}" + (f"; {before} of them done before" if before else "")
