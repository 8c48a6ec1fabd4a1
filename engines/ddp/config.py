"""Configuration of the ddp engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engines.ddp.engine import DDPEngine


@dataclass
class Config:
    name: str = "ddp"
    """The engine."""
    bucket_mb: float = 25.0
    """Gradients are summed in buckets of so many MiB, while the backward pass goes on."""


def check(config: Config) -> None:
    """Raise ValueError with a line for each value that no run can have."""
    if not config.bucket_mb > 0:
        raise ValueError(f"engine.bucket_mb {config.bucket_mb:g}   must be above 0   -> engine.bucket_mb=25")


def build(config: Config) -> DDPEngine:
    from engines.ddp.engine import DDPEngine

    return DDPEngine(config)
