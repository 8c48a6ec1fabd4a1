"""The live table of a race on a terminal; elsewhere (a log file) a line for each entry that has started, and now
and then one for a round."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from harness.core.units import UNKNOWN, seconds
from harness.races.entries import Entry
from harness.races.verdict import ratio
from harness.sweep.live_table import DRAW_S, LiveView

SAY_S = 10.0
"""Seconds between two lines where there is no live table."""
LOOKED_AT_BYTES = 4096


class Display(LiveView):
    """What is known of a race while it runs."""

    def __init__(self, entered: Sequence[Entry], console: Console | None = None) -> None:
        super().__init__(console)
        self.entered = entered
        self.states = {one.name: "refused" if one.config is None else "waits" for one in entered}
        self.rounds, self.speeds = 0, dict.fromkeys(self.states, UNKNOWN)
        self._drawn_s = self._compared_s = self._looked_s = time.monotonic()
        self._starting: tuple[str, Path] | None = None
        self._doing = ""

    def starts(self, one: Entry, console: Path) -> None:
        """An entry starts, whose output is in the file `console`."""
        self.states[one.name], self._starting, self._doing = "starts", (one.name, console), ""
        if not self._live:
            self._say(f"{one.name} starts, entry {self.entered.index(one) + 1} of {len(self.entered)}")

    def started(self, one: Entry, ready: bool) -> None:
        """An entry is ready, or has ended before it was."""
        self.states[one.name], self._starting, self._doing = "ready" if ready else "failed", None, ""
        if not self._live:
            self._say(f"{one.name} is ready" if ready else f"{one.name} has ended before its first turn")

    def failed(self, one: Entry) -> None:
        """An entry has ended in its turn."""
        self.states[one.name] = "failed"
        if not self._live:
            self._say(f"{one.name} has ended in round {self.rounds + 1}")

    def round_ended(self, number: int, alive: Sequence[str]) -> None:
        """So many rounds are done, by those who are `alive`."""
        self.rounds = number
        now = time.monotonic()
        if now - self._compared_s >= (DRAW_S if self._live else SAY_S):
            self._compared_s = now
            self.speeds = {one.name: self._speed(one) for one in self.entered}
            if not self._live:
                self._say(f"round {number}: " + ", ".join(f"{name} {self.speeds[name]}" for name in alive))
        self.refresh()

    def refresh(self) -> None:
        """Show how things stand, now and then."""
        now = time.monotonic()
        if self._live and now - self._drawn_s >= DRAW_S:
            self._drawn_s = now
            self._look()
            self._live.update(Group(self._table(), Text(self._doing or f"{self.rounds} rounds")), refresh=True)
        elif not self._live and self._starting and now - self._looked_s >= SAY_S:
            self._looked_s, before = now, self._doing
            self._look()
            if self._doing != before:
                self._say(self._doing)

    def _look(self) -> None:
        """What the entry that starts has last said that it does."""
        if self._starting:
            name, console = self._starting
            line = _last_line(console)
            self._doing = f"{name}: {line}" if line else ""

    @property
    def _reference(self) -> Entry:
        """The first entry that has not failed."""
        lost = ("refused", "failed")
        return next((one for one in self.entered if self.states[one.name] not in lost), self.entered[0])

    def _say(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for title in ("entry", "", "step time", f"speed / {self._reference.name} (95 %)"):
            table.add_column(title, justify="right" if title.startswith("s") else "left")
        for one in self.entered:
            step = seconds(one.step_time_s) if one.rounds_s else UNKNOWN
            table.add_row(one.name, self.states[one.name], step, self.speeds[one.name])
        return table

    def _speed(self, one: Entry) -> str:
        """Its speed over the reference's, as long as both have had the same rounds."""
        first = self._reference.rounds_s
        common = min(len(one.rounds_s), len(first))
        return str(ratio(one.rounds_s[:common], first[:common])) if common else UNKNOWN


def _last_line(path: Path) -> str:
    """The last whole line of a file that is being written; "" where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOOKED_AT_BYTES))
            lines = file.read().decode(errors="replace").split("\n")[:-1]
    except FileNotFoundError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
