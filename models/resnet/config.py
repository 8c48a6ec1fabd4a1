"""The keys of `model=resnet`."""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.core.problem import Problem
from harness.core.value_checks import one_of
from models.config_ranges import at_least, each_at_least_1

CUTS = ("block", "layer")

TASK = "classification"
"""The task that the model is trained for."""


@dataclass
class Config:
    """ResNet with bottlenecks. The default has the depth of ResNet-50 and is thin: it trains on a laptop."""

    name: str = "resnet"
    """The network: models/resnet."""
    blocks: list[int] = field(default_factory=lambda: [3, 4, 6, 3])
    """Number of bottlenecks in each stage: [3,4,6,3] is ResNet-50, [3,4,23,3] ResNet-101."""
    channels: int = 16
    """Inner channels of the first stage's bottlenecks (64 in the papers); each later stage has twice as many."""
    size: int = 64
    """Width and height of an image in pixels; at least 33 with four stages."""
    classes: int = 10
    """Number of classes; the papers have 1000."""
    cut: str = "block"
    """What one layer of the model is: block (a whole bottleneck) or layer (an elementary layer, with skips)."""


def check(config: Config) -> list[Problem]:
    """Numbers that no model can have."""
    blocks, wrong = each_at_least_1(config, "blocks", "stage")
    halvings = len(blocks) + 1
    smallest = 2**halvings + 1
    left = -(-max(config.size, 0) // 2**halvings)
    why = f"{halvings} halvings leave {left} x {left} pixels, batch norm needs 2 x 2"
    wrong += at_least(config, "channels", 1)
    wrong += at_least(config, "size", smallest, why, fix=smallest)
    wrong += at_least(config, "classes", 2)
    return wrong + one_of("model.cut", config.cut, CUTS, "block")
