"""Configuration of the torchgpipe engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.installed import problem_line
from harness.schedule.gpipe import check_mode

if TYPE_CHECKING:
    from engines.torchgpipe.engine import TorchGPipeEngine


@dataclass
class Config:
    """The words are torchgpipe's own.

    `engines.torchgpipe.engine` tells what it cannot do: above all, on CPU devices none of its tasks overlap.
    """

    name: str = "torchgpipe"
    """The engine."""
    checkpoint: str = "except_last"
    """Which micro-batches are recomputed in the backward pass: always, except_last or never."""
    deferred_batch_norm: bool = False
    """Batch norm gathers its running statistics over the whole mini-batch (torchgpipe's: its variance is the biased
    one)."""


def check(config: Config) -> None:
    """Raise ValueError with a line for each value that no run can have, and one where torchgpipe is not installed."""
    wrong = problem_line("torchgpipe", "torchgpipe", "pip install -e .[peers]")
    wrong += check_mode("engine.checkpoint", config.checkpoint, "except_last")
    if wrong:
        raise ValueError("\n".join(wrong))


def build(config: Config) -> TorchGPipeEngine:
    from engines.torchgpipe.engine import TorchGPipeEngine

    return TorchGPipeEngine(config)
