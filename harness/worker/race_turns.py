"""The turns of a run in a race (`harness.launch.turns`), for all of its ranks: rank 0 waits for them, others for it.

turn     |== step ==|== step ==|   the first one brings back into the caches what other runs have displaced,
                                   the second is measured
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from harness.launch.process_group import is_first_rank
from harness.launch.turns import STEPS, VARIABLE, Turns, Word

PATIENCE = timedelta(days=7)
"""How long a rank waits for rank 0, which waits for a turn: others may profile and warm up for hours meanwhile."""


class RaceTurns:
    """Paces the steps of a training run. Outside of a race every step may begin, and each one is measured."""

    def __init__(self, folder: Path, warmup: int) -> None:
        self.folder, self.warmup = folder, warmup
        self.races = VARIABLE in os.environ
        self.own: Turns | None = None
        self.ranks: dist.ProcessGroup | None = None

    def before(self, step: int) -> Word:
        """What is to be done before a step: "turn", it may begin, once the turn that it is the first step of has come;
        "end", the race is over; "stop", the run was asked to stop."""
        if not self.races or step < self.warmup or (step - self.warmup) % STEPS:
            return "turn"
        if step == self.warmup:
            self._join()
        word: list[Word] = [self.own.wait() if self.own else "turn"]
        if self.ranks:
            dist.broadcast_object_list(word, group=self.ranks)
        return word[0]

    def _join(self) -> None:
        """Come to the race. Ranks wait in gloo, which sleeps: NCCL would keep the GPU busy that another run uses."""
        if dist.is_initialized():
            self.ranks = dist.new_group(backend="gloo", timeout=PATIENCE)
        if is_first_rank():
            self.own = Turns.of_environment(self.folder)

    def measures(self, step: int) -> bool:
        """Whether a step is measured, after the warm-up."""
        return step >= self.warmup and (not self.races or self.ends_turn(step))

    def ended(self, step: int, step_time_s: float) -> None:
        """Report a step that has ended, if it ends a turn: nothing is left to do before the next turn."""
        if self.own and self.ends_turn(step):
            self.own.took(step_time_s=step_time_s)

    def ends_turn(self, step: int) -> bool:
        """Whether a step is the last one of a turn: the other runs still wait when it has ended."""
        return self.races and step >= self.warmup and (step - self.warmup) % STEPS == STEPS - 1
