"""Configuration of the fsdp engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engines.fsdp.engine import FSDPEngine


@dataclass
class Config:
    name: str = "fsdp"
    """The engine."""
    group_mb: float = 0.25
    """Neighbouring layers are gathered together, up to so many MiB of weights, which are whole at a time; 0: each layer
    alone."""
    reshard_after_forward: bool = True
    """Free gathered weights behind a layer's forward pass and gather them again for its backward pass (ZeRO-3). False
    keeps them in between: less to send, more memory."""
    reduce_each: bool = True
    """Sum the gradients of each micro-batch into their shards, as torch does by default. False sums those of all at
    once, whole until then: less to send, more memory."""


def check(config: Config) -> None:
    """Raise ValueError with a line for each value that no run can have."""
    if not config.group_mb >= 0:
        raise ValueError(f"engine.group_mb {config.group_mb:g}   must be at least 0   -> engine.group_mb=0.25")


def build(config: Config) -> FSDPEngine:
    from engines.fsdp.engine import FSDPEngine

    return FSDPEngine(config)
