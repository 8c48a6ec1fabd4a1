"""The display of a sweep: a live table on a terminal, else a line for each point; and the table as CSV."""

from __future__ import annotations

import csv
import io
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from harness.core.plan import Plan
from harness.core.record import RunRecord
from harness.core.units import UNKNOWN, percent, rate, seconds, size
from harness.report.closing_table import ending
from harness.sweep.points import Point

REASON_LINES = 8
LOG_WIDTH = 160
UNIT = "samples/s"
BEST = "*"
PREDICTED = "~"
FIGURES = ("throughput", "step_time_s", "peak_memory_bytes", "bubble_fraction", "devices", "period_s")
"""The figures of a point in the file, by their names there."""
DRAW_S = 0.5
"""Between two pictures of the live table."""
HEAD_LINES = 4
"""Lines of a terminal that are not for points: titles, progress, a line to spare."""
EXTENT = ("devices", "bubble", "period")
"""Columns that are only there if some point has something to show."""


@dataclass
class Row:
    """One point: waiting without `began_s`, running without `record`.

    `before` if an earlier start finished it. `waits` is what it does without either, `waits_for` why, as a batch system
    says, and `log` what that kept.
    """

    point: Point
    began_s: float | None = None
    record: RunRecord | None = None
    before: bool = False
    waits: str = UNKNOWN
    waits_for: str = ""
    log: Path | None = None

    @property
    def status(self) -> str:
        """ok (simulated), before; pending (Priority)"""
        if self.record is None and self.began_s is None:
            return f"{self.waits} ({self.waits_for})" if self.waits_for else self.waits
        if self.record is None:
            return f"running {time.monotonic() - (self.began_s or 0.0):.0f} s"
        ended = ending(self.record)
        return f"{ended}, before" if self.before else ended

    @property
    def predicts(self) -> bool:
        """Whether a figure that is shown is only predicted."""
        return any(self._figure(name)[1] for name in FIGURES)

    def figures(self, unit: str = UNIT) -> tuple[str, str, str]:
        """Throughput in `unit`, step time, memory of the fullest device; "~" marks a prediction."""
        return (
            self._shown("throughput", partial(rate, unit=unit)),
            self._shown("step_time_s", seconds),
            self._shown("peak_memory_bytes", size),
        )

    def extent(self) -> tuple[str, str, str]:
        """`EXTENT`: number of devices; the bubble; the period, where the planner plans one."""
        bubble, period = self._shown("bubble_fraction", percent), self._shown("period_s", seconds)
        return str(self.devices or UNKNOWN), bubble, period

    @property
    def devices(self) -> int | None:
        """The devices of the plan, with all replicas."""
        if self.record is None or self.record.plan is None:
            return None
        plan = Plan.from_json(self.record.plan)
        return len(plan.devices) * plan.mesh.data * plan.mesh.tensor

    @property
    def throughput(self) -> float | None:
        """Throughput of a point that is ok, else None."""
        return self._figure("throughput")[0] if self.record and self.record.status == "ok" else None

    def numbers(self) -> dict[str, float | None]:
        """`FIGURES` in full; of a measured point nothing that was only predicted."""
        found: dict[str, float | None] = dict.fromkeys(FIGURES) | {"devices": self.devices}
        for name in FIGURES:
            value, predicted = self._figure(name)
            if value is not None and not (predicted and self.record and self.record.source == "measured"):
                found[name] = value
        return found

    def _shown(self, name: str, text: Callable[[float | None], str]) -> str:
        value, predicted = self._figure(name)
        return f"{PREDICTED}{text(value)}" if predicted else text(value)

    def _figure(self, name: str) -> tuple[float | None, bool]:
        """A figure of the record (the largest, where it has one for each device), and whether it was only predicted."""
        if self.record is None:
            return None, False
        for predicted, figures in enumerate((self.record.metrics, self.record.predicted)):
            value: Any = figures.get(name)
            if isinstance(value, list):
                value = max((one for one in value if one is not None), default=None)
            if value is not None:
                return value, bool(predicted)
        return None, False


class Display:
    """Live on a terminal; elsewhere (a log file) a line for each point that has ended."""

    def __init__(self, rows: Sequence[Row], console: Console | None = None) -> None:
        self.rows = rows
        self.console = console or console_of_sweep()
        self.began_s = time.monotonic()
        self._drawn_s = -math.inf
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
        now = time.monotonic()
        if self._live and now - self._drawn_s >= DRAW_S:
            self._drawn_s = now
            self._live.update(Group(table(self._window()), Text(self.progress(now))), refresh=True)

    def progress(self, now_s: float) -> str:
        """3 of 8 points, best 31.4 samples/s (seed=1), about 2 min left"""
        ended = [row for row in self.rows if row.record]
        parts = [f"{len(ended)} of {len(self.rows)} points"]
        leader = next((row for row in ended if row.throughput == best(self.rows) is not None), None)
        if leader:
            parts.append(f"best {rate(leader.throughput)} ({leader.point.id})")
        ran = sum(not row.before for row in ended)
        left = (now_s - self.began_s) / ran * (len(self.rows) - len(ended)) if ran else 0.0
        return ", ".join([*parts, f"about {duration(left)} left"] if left else parts)

    def _window(self) -> Sequence[Row]:
        """Return as many points as fit on the terminal, with the running one among the last of them."""
        room = max(1, self.console.height - HEAD_LINES)
        current = next((number for number, row in enumerate(self.rows) if row.record is None), len(self.rows))
        first = max(0, min(current + 2, len(self.rows)) - room)
        return self.rows[first : first + room]

    def note(self, text: str) -> None:
        """A line that stays, above the live table."""
        self.console.print(Text(f"note: {text}"), soft_wrap=True)

    def ended(self, row: Row) -> None:
        """Show that a point has its record."""
        self.refresh()
        if not self._live:
            number = self.rows.index(row) + 1
            values = _values(self.rows)[number - 1]
            varied = " ".join(f"{key}={value}" for key, value in zip(differing(self.rows), values, strict=True))
            figures = [text for text in row.figures() if text != UNKNOWN]
            parts = [f"[{number}/{len(self.rows)}] {row.point.id}", varied, row.status, *figures]
            self.console.print(Text("  ".join(part for part in parts if part)), soft_wrap=True)


def duration(length_s: float) -> str:
    """45 s, 12 min, 3 h 20 min"""
    minutes = round(length_s / 60)
    if minutes < 2:
        return f"{length_s:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def console_of_sweep() -> Console:
    """Return a console as wide as the terminal. It keeps this stdout while a point's own goes to a file."""
    console = Console(file=sys.stdout)
    return console if console.is_terminal else Console(file=sys.stdout, width=LOG_WIDTH)


def differing(rows: Sequence[Row]) -> list[str]:
    """The keys in which the points differ, in order of appearance."""
    values = [row.point.values() for row in rows]
    keys = dict.fromkeys(key for point in values for key in point)
    return [key for key in keys if len({point.get(key) for point in values}) > 1]


def table(rows: Sequence[Row]) -> Table:
    """A row for each point: id, what differs, status, throughput, step time, memory; what is known of `EXTENT`."""
    shown = Table(box=None, pad_edge=False)
    extents = [row.extent() for row in rows]
    known = [number for number in range(len(EXTENT)) if any(extent[number] != UNKNOWN for extent in extents)]
    for title in ("id", *_short(differing(rows)), "status"):
        shown.add_column(Text(title), overflow="fold")
    for title in (UNIT, "step time", "memory", *(EXTENT[number] for number in known)):
        shown.add_column(title, justify="right", no_wrap=True)
    most = best(rows)
    for row, values, extent in zip(rows, _values(rows), extents, strict=True):
        speed, *others = row.figures(unit="")
        if most is not None:
            speed += f" {BEST if row.throughput == most else ' '}"
        cells = [row.point.id, *values, row.status, speed, *others, *(extent[number] for number in known)]
        shown.add_row(*map(Text, cells))
    return shown


def best(rows: Sequence[Row]) -> float | None:
    """The highest throughput of the points that are ok; None where there is nothing to choose from."""
    found = [row.throughput for row in rows if row.throughput is not None]
    return max(found) if len(found) > 1 else None


def _values(rows: Sequence[Row]) -> list[list[str]]:
    """Return the values that differ among points; of a path only the last part, if that is enough."""
    columns = []
    for key in differing(rows):
        whole = [row.point.values().get(key, UNKNOWN) for row in rows]
        lasts = [value.rstrip("}'\"").rpartition("/")[2] for value in whole]
        columns.append(lasts if len(set(lasts)) == len(set(whole)) else whole)
    return [list(cells) for cells in zip(*columns, strict=True)] or [[] for _ in rows]


def _short(keys: Sequence[str]) -> list[str]:
    """micro_batches for batch.micro_batches, where no other key ends like it."""
    lasts = [key.rpartition(".")[2] for key in keys]
    return [last if lasts.count(last) == 1 else key for key, last in zip(keys, lasts, strict=True)]


def close(rows: Sequence[Row], folder: Path, console: Console | None = None) -> None:
    """Print the closing table, why points failed, and one line about the whole sweep."""
    console = console or console_of_sweep()
    console.print(table(rows))
    if best(rows) is not None:
        console.print(Text(f"{BEST} best throughput"))
    if any(row.predicts for row in rows):
        console.print(Text(f"{PREDICTED} predicted"))
    for row in rows:
        if row.record is not None and row.record.status != "ok":
            lines = row.record.reason.strip().splitlines()[:REASON_LINES] + ([f"log: {row.log}"] if row.log else [])
            console.print(Text("\n  ".join([f"{row.point.id} {row.record.status}", *lines])), soft_wrap=True)
    console.print(Text(f"{summary(rows)} ({folder})"), soft_wrap=True)


def summary(rows: Sequence[Row]) -> str:
    """6 points: 4 ok, 1 oom, 1 not run; 2 of them done before"""
    states = [row.record.status if row.record else _waiting(row) for row in rows]
    counts = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states), key=lambda s: (s != "ok", s)))
    before = sum(row.before for row in rows)
    return f"{len(rows)} points: {counts}" + (f"; {before} of them done before" if before else "")


def _waiting(row: Row) -> str:
    return "not run" if row.waits == UNKNOWN else row.waits


def as_csv(rows: Sequence[Row]) -> str:
    """A line for each point, nothing shortened: id, every key that differs, status, source, `FIGURES`."""
    keys = differing(rows)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["id", *keys, "status", "source", *FIGURES])
    for row in rows:
        values, numbers = row.point.values(), row.numbers()
        ended = (row.record.status, row.record.source) if row.record else (_waiting(row), "")
        writer.writerow([row.point.id, *(values.get(key, "") for key in keys), *ended, *(numbers[n] for n in FIGURES)])
    return text.getvalue()
