"""How the parent of a run has its ranks stop at a signal: at the end of a step, with a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from harness import checkpoint_files
from harness.launch import Preempted, Signals

STOP = "stop"
"""The file in a run's folder that asks for it. Rank 0 looks for it after each step, and tells the others."""


class Stopping:
    """Within it signals are noted; it is to `look` for them all the time while ranks train. `say` tells the user."""

    def __init__(self, folder: Path, signals: Signals, grace_s: float, say: Callable[[str], None]) -> None:
        self.folder, self.signals, self.grace_s, self.say = folder, signals, grace_s, say
        self.deadline_s: float | None = None

    def __enter__(self) -> Self:
        (self.folder / STOP).unlink(missing_ok=True)
        self.signals.noting = True
        return self

    def __exit__(self, *error: object) -> None:
        self.signals.noting = False
        (self.folder / STOP).unlink(missing_ok=True)

    def look(self) -> None:
        """Ask the ranks to stop if a signal has come; raises `Preempted` if they take longer than `grace_s`."""
        if not self.signals.asked:
            return
        if self.deadline_s is None:
            self.deadline_s = time.monotonic() + self.grace_s
            (self.folder / STOP).touch()
            self.say(f"{self.signals.asked}: the run stops after this step, and leaves a checkpoint")
        elif time.monotonic() > self.deadline_s:
            late = f"its ranks did not stop within launch.grace_s={self.grace_s:g} s"
            raise Preempted(f"ended by {self.signals.asked}: {late}; {self.kept}")

    def stopped(self, done: int) -> Preempted:
        """The end of a run whose ranks stopped after so many steps."""
        asked = self.signals.asked or f"the file {self.folder / STOP}"
        return Preempted(f"ended by {asked} {checkpoint_files.after(done)}; {self.kept}")

    @property
    def kept(self) -> str:
        """What the run can go on from."""
        found = checkpoint_files.steps(self.folder)
        return f"the last checkpoint is {checkpoint_files.after(found[0])}" if found else "there is no checkpoint"
