"""Configuration of the sbp engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engines.sbp.engine import SBPEngine


@dataclass
class Config:
    name: str = "sbp"
    """The engine."""
    overlap: bool = True
    """Whether sums of gradients run beside the rest of the backward pass."""
    aligned: bool = False
    """Whether devices wait for each other before each collective, so that its time is its own: to measure it."""


def build(config: Config) -> SBPEngine:
    from engines.sbp.engine import SBPEngine

    return SBPEngine(config)
