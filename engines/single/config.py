"""Configuration of the single engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.schedule.gpipe import check_mode

if TYPE_CHECKING:
    from engines.single.engine import SingleEngine


@dataclass
class Config:
    name: str = "single"
    """The engine."""
    checkpoint: str = "never"
    """Which micro-batches are recomputed in the backward pass: always, except_last or never."""
    deferred_batch_norm: bool = False
    """Batch norm gathers its running statistics over the whole mini-batch, not for each micro-batch."""
    threads: int = 1
    """Intra-op threads on a CPU device; 0 takes one for each core."""


def check(config: Config) -> None:
    """Raise ValueError with a line for each value that no run can have."""
    wrong = check_mode("engine.checkpoint", config.checkpoint, "never")
    if config.threads < 0:
        wrong.append(f"engine.threads {config.threads}   must be at least 1, or 0 for all cores   -> engine.threads=1")
    if wrong:
        raise ValueError("\n".join(wrong))


def build(config: Config) -> SingleEngine:
    from engines.single.engine import SingleEngine

    return SingleEngine(config)
