"""The display of a sweep: a live table on a terminal, else a line for each point that has ended."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from harness.core.units import UNKNOWN, rate
from harness.sweep.row import Row
from harness.sweep.table import best, console_of_sweep, differing, table, values_of

DRAW_S = 0.5
"""Between two pictures of the live table."""
SAY_S = 2.0
"""Between two lines about a point in a log file."""
HEAD_LINES = 6
"""Lines of a terminal that are not for points: titles, progress, a line to spare."""


class LiveView:
    """A picture on a terminal that is drawn again while things go on; elsewhere (a log file) there is none."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or console_of_sweep()
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


class Display(LiveView):
    """Live on a terminal; elsewhere (a log file) a line for each point that has ended."""

    def __init__(self, rows: Sequence[Row], console: Console | None = None) -> None:
        super().__init__(console)
        self.rows = rows
        self._doing, self._said, self._said_s = "", "", -math.inf
        self.began_s = time.monotonic()

    def refresh(self) -> None:
        """Show how things stand; cheap, to be called while a point runs."""
        now = time.monotonic()
        if self._live and now - self._drawn_s >= DRAW_S:
            self._drawn_s = now
            shown, _ = table(self._window(), self.console.width)
            below = [self.progress(now), *([self._doing] if self._doing else [])]
            self._live.update(Group(shown, *map(Text, below)), refresh=True)

    def doing(self, row: Row, text: str) -> None:
        """Show what a point is doing that runs in this process; in a log file now and then."""
        self._doing = text
        self.refresh()
        now = time.monotonic()
        if not self._live and text != self._said and now - self._said_s >= SAY_S:
            self._said_s, self._said = now, text
            self.console.print(Text(f"[{self.rows.index(row) + 1}/{len(self.rows)}] {text}"), soft_wrap=True)

    def progress(self, now_s: float) -> str:
        """3 of 8 points, best 31.4 samples/s (seed=1), about 2 min left"""
        ended = [row for row in self.rows if row.record]
        parts = [f"{len(ended)} of {len(self.rows)} points"]
        leading = best(self.rows)
        if len({row.trained for row in leading}) == 1:
            leader = leading[0]
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
        self._doing = ""
        self.refresh()
        if not self._live:
            number = self.rows.index(row) + 1
            keys = differing(self.rows)
            values = zip(keys, values_of(self.rows, keys)[number - 1], strict=True)
            varied = " ".join(f"{key}={value}" for key, value in values if value != UNKNOWN)
            figures = [text for text in row.figures() if text != UNKNOWN]
            parts = [f"[{number}/{len(self.rows)}] {row.point.id}", varied, row.status, *figures]
            self.console.print(Text("  ".join(part for part in parts if part)), soft_wrap=True)


def duration(length_s: float) -> str:
    """45 s, 12 min, 3 h 20 min"""
    minutes = round(length_s / 60)
    if minutes < 2:
        return f"{length_s:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
