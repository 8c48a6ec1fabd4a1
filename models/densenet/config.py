"""The keys of `model=densenet`."""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.core.problem import Problem
from models.config_ranges import at_least, each_at_least_1

TASK = "classification"
"""The task that the model is trained for."""


@dataclass
class Config:
    """DenseNet with bottlenecks. The default has the depth of DenseNet-121 and is thin: it trains on a laptop."""

    name: str = "densenet"
    """The network: models/densenet."""
    blocks: list[int] = field(default_factory=lambda: [6, 12, 24, 16])
    """Number of dense layers in each dense block: [6,12,24,16] is DenseNet-121."""
    growth: int = 8
    """Growth rate: channels that a dense layer adds (32 in the papers). The stem has twice, a bottleneck four times as
    many."""
    size: int = 64
    """Width and height of an image in pixels; at least 61 with four blocks."""
    classes: int = 10
    """Number of classes; the papers have 1000."""


def check(config: Config) -> list[Problem]:
    """Numbers that no model can have."""
    blocks, wrong = each_at_least_1(config, "blocks", "block")
    halvings = len(blocks) + 1
    smallest = 2 ** (halvings + 1) - 3  # ceil(size / 4) >= 2^blocks: only the stem rounds up
    left = -(-max(config.size, 0) // 4) >> (halvings - 2)
    why = f"{halvings} halvings leave {left} x {left} pixels, batch norm needs 2 x 2"
    wrong += at_least(config, "growth", 1)
    wrong += at_least(config, "size", smallest, why, fix=smallest)
    wrong += at_least(config, "classes", 2)
    return wrong
