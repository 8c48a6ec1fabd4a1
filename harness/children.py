"""What the parent of a run has others do: processes that import torch, which it never does itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from harness import launch, machine
from harness.launch import Outcome
from harness.machine import Machine
from harness.problem import CannotRun
from harness.srun import Step

MACHINE = "machine.json"


class ChildFailed(Exception):
    """A process that was started did not end well; carries the `Outcome`."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        super().__init__(outcome.reason)


def work(
    folder: Path, title: str, timeout_s: float, *words: str, follow: Callable[[], None] = lambda: None,
    step: Step | None = None,
) -> None:  # fmt: skip
    """Have a rank of the run in `folder` do what `words` say ("profile", "2"), to its end; with a `step` many ranks.

    `follow` is called all the time in between. Raises `CannotRun` for problems that only a rank could find,
    `ChildFailed` for all other ends.
    """
    # -P: a module in the user's folder does not hide one of this project
    command = [sys.executable, "-P", "-m", "harness.rank", str(folder.resolve()), *words]
    with step.tidy(folder) if step else nullcontext():
        if step:
            command = [*step.command(), *command, step.token]
        outcome = launch.supervise([command], folder, timeout_s, follow, step)
    if outcome.problems:
        raise CannotRun(outcome.problems, title)
    if outcome.status != "ok":
        raise ChildFailed(outcome)


def measured_machine(folder: Path, title: str, timeout_s: float, wanted: str) -> Machine:
    """What this machine's devices of kind `wanted` can do, measured now and kept for later runs; raises as `work`."""
    work(folder, title, timeout_s, "machine", wanted)
    found = Machine.load(folder / MACHINE)
    (folder / MACHINE).unlink()
    machine.store(found)
    return found
