"""Configuration of the gpipe engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.schedule.gpipe import check_mode

if TYPE_CHECKING:
    from engines.gpipe.engine import GPipeEngine


@dataclass
class Config:
    name: str = "gpipe"
    """The engine."""
    checkpoint: str = "except_last"
    """Which micro-batches are recomputed in the backward pass: always, except_last or never."""
    dependency: bool = True
    """Fork and join fix the order of the backward pass; without them autograd chooses."""
    streams: bool = True
    """Copies have queues of their own; without them a copy occupies the compute queues of both devices."""
    portals: bool = True
    """A skip goes straight to the stage that pops it; without portals it is copied through every stage in between."""
    deferred_batch_norm: bool = False
    """Batch norm gathers its running statistics over the whole mini-batch, not for each micro-batch."""


def check(config: Config) -> None:
    """Raise ValueError with a line for each value that no run can have."""
    if wrong := check_mode("engine.checkpoint", config.checkpoint, "except_last"):
        raise ValueError("\n".join(wrong))


def build(config: Config) -> GPipeEngine:
    from engines.gpipe.engine import GPipeEngine

    return GPipeEngine(config)
