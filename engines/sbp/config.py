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


def build(config: Config) -> SBPEngine:
    from engines.sbp.engine import SBPEngine

    return SBPEngine(config)
