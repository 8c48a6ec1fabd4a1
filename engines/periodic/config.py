"""Configuration of the periodic engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engines.periodic.engine import PeriodicEngine


@dataclass
class Config:
    """`engines.periodic.versions` tells which weights a micro-batch sees."""

    name: str = "periodic"
    """The engine."""
    update_every: int | None = None
    """Micro-batches for each update of the weights; null takes the fewest that two versions of the weights allow. With
    as many as batch.micro_batches there is one update a step, as in engine=single."""


def check(config: Config) -> None:
    """Raise ValueError for a number of micro-batches that no run can have."""
    if config.update_every is not None and config.update_every < 1:
        key = f"engine.update_every {config.update_every}"
        raise ValueError(f"{key}   must be at least 1, or null   -> engine.update_every=null")


def build(config: Config) -> PeriodicEngine:
    from engines.periodic.engine import PeriodicEngine

    return PeriodicEngine(config)
