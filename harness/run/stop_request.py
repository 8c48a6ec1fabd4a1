"""At a signal the parent of a run asks its ranks to stop: after the current step, with a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from harness.core.run_files import STOP
from harness.launch.signals import Preempted, Signals
from harness.run import checkpoint_files
from harness.run.checkpoint_files import after_steps


class StopRequest:
    """Within it signals are noted; `check` is to be called all the time while ranks train. `say` prints for the user.

    The request is the file `stop` in the run's folder: rank 0 looks for it after each step, and sends it to the others.
    """

    def __init__(self, folder: Path, signals: Signals, grace_s: float, say: Callable[[str], None]) -> None:
        self.folder, self.signals, self.grace_s, self.say = folder, signals, grace_s, say
        self.deadline_s: float | None = None

    def __enter__(self) -> Self:
        checkpoint_files.remove(self.folder / STOP)
        self.signals.noting = True
        return self

    def __exit__(self, *error: object) -> None:
        self.signals.noting = False
        checkpoint_files.remove(self.folder / STOP)

    def check(self) -> None:
        """Ask the ranks to stop if a signal has come; raises `Preempted` if they take longer than `grace_s`."""
        if not self.signals.asked:
            return
        if self.deadline_s is None:
            self.deadline_s = time.monotonic() + self.grace_s
            (self.folder / STOP).touch()
            self.say(f"{self.signals.asked}: the run stops after this step, and leaves a checkpoint")
        elif time.monotonic() > self.deadline_s:
            late = f"its ranks did not stop within launch.grace_s={self.grace_s:g} s"
            raise Preempted(f"ended by {self.signals.asked}: {late}; {self._last_checkpoint()}")

    def stopped(self, steps: int) -> Preempted:
        """The end of a run whose ranks stopped after so many steps, by a signal or a file `stop` of the user's own."""
        asked = self.signals.asked or f"the file {self.folder / STOP}"
        return Preempted(f"ended by {asked} {after_steps(steps)}; {self._last_checkpoint()}")

    def _last_checkpoint(self) -> str:
        steps = checkpoint_files.steps(self.folder)
        return f"the last checkpoint is {after_steps(steps[0])}" if steps else "there is no checkpoint"
