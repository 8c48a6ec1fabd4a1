"""Shows the phases and steps of one run: live on a terminal, as occasional lines in a log file."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.status import Status
from rich.text import Text

from harness.core.problem import CannotRun
from harness.core.units import number, rate, seconds
from harness.report import closing_table

PLAIN_INTERVAL_S = 5.0


class Progress:
    """Shows what a run is doing; `watch` is called with it, too.

    with Progress() as progress:
        progress.phase("profiling", "unet, micro-batches of 2")
        progress.phase("planning")
        progress.steps(10)
        progress.step(1, loss=0.69, samples_per_s=120.0)
    """

    def __init__(self, console: Console | None = None, watch: Callable[[str], None] | None = None) -> None:
        self.console, self._watch = console or closing_table.console(), watch
        self._live = self.console.is_terminal and not self.console.is_dumb_terminal
        self._name = ""
        self._began_s = 0.0
        self._status: Status | None = None
        self._bar: Bar | None = None
        self._total = 0
        self._printed_s, self._printed = float("-inf"), ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        quiet = kind is None or issubclass(kind, CannotRun)  # CannotRun is no crash, and its reasons are printed
        self._end("" if quiet else "stopped" if isinstance(error, KeyboardInterrupt) else "failed")

    def phase(self, name: str, detail: str = "") -> None:
        """Ends the previous phase (or bar) and begins this one."""
        self._end()
        self._name, self._began_s = name, time.monotonic()
        text = f"{name}  {detail}" if detail else name
        self._say(text)
        if self._live:
            self._status = Status(Text(text), console=self.console, spinner="line")
            self._status.start()
        else:
            self.note(text)

    def detail(self, text: str) -> None:
        """Shows how far this phase is: at once on a terminal; in a log file now and then, if it is new."""
        self._say(f"{self._name}  {text}")
        if self._status is not None:
            self._status.update(Text(f"{self._name}  {text}"))
        elif not self._live and self._printed != text and time.monotonic() - self._printed_s >= PLAIN_INTERVAL_S:
            self._printed_s, self._printed = time.monotonic(), text
            self.note(f"{self._name}  {text}")

    def steps(self, total: int) -> None:
        """Begins the bar over `total` training steps."""
        self._end()
        self._name, self._began_s, self._total, self._printed_s = "training", time.monotonic(), total, float("-inf")
        if self._live:
            self._bar = Bar(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
            )
            self._bar.add_task("", total=total)
            self._bar.start()

    def step(self, done: int, loss: float | None, samples_per_s: float | None) -> None:
        """Shows that `done` steps have ended; the figures are those of the last one."""
        text = f"loss {number(loss)}   {rate(samples_per_s)}"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, description=text)
            return
        now = time.monotonic()
        if not self._live and (done >= self._total or now - self._printed_s >= PLAIN_INTERVAL_S):
            self._printed_s = now
            self.note(f"step {done}/{self._total}   {text}")

    def _say(self, text: str) -> None:
        if self._watch:
            self._watch(text)

    def note(self, text: str) -> None:
        """Prints one line above the live display."""
        self.console.print(Text(text), soft_wrap=True)

    def _end(self, how: str = "") -> None:
        for live in (self._status, self._bar):
            if live is not None:
                live.stop()
        self._status = self._bar = None
        if self._name and (self._live or how):
            self.note(f"{self._name}  {how and f'{how} after '}{seconds(time.monotonic() - self._began_s)}")
        self._name = ""
