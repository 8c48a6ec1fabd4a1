"""Configuration of the single engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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


def build(config: Config) -> SingleEngine:
    from engines.single.engine import SingleEngine

    return SingleEngine(config)
