"""The keys of `model=densenet`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from models.limits import at_least, each_at_least_1

if TYPE_CHECKING:
    from models.densenet.densenet import DenseNet

TASK = "classification"
"""What it is trained for."""


@dataclass
class Config:
    """DenseNet with bottlenecks. The default has the depth of DenseNet-121 and is thin: it trains on a laptop."""

    name: str = "densenet"
    """The network: models/densenet."""
    blocks: list[int] = field(default_factory=lambda: [6, 12, 24, 16])
    """Dense layers of each dense block: [6,12,24,16] is DenseNet-121."""
    growth: int = 8
    """Channels that a dense layer adds (32 in the papers); the stem makes twice, its bottleneck four times as many."""
    size: int = 64
    """Side of the square image in pixels; at least 61 with four blocks."""
    classes: int = 10
    """What an image may show; 1000 in the papers."""


def build(config: Config) -> DenseNet:
    """The model; raises ValueError that names each key whose number is impossible."""
    from models.densenet.densenet import DenseNet

    return DenseNet(config)


def check(config: Config) -> None:
    """Raise ValueError with a line, `key   what   -> mend`, for each impossible number."""
    blocks, wrong = each_at_least_1(config, "blocks", "block")
    halvings = len(blocks) + 1
    smallest = 2 ** (halvings + 1) - 3  # ceil(size / 4) >= 2^blocks: only the stem rounds up
    left = -(-max(config.size, 0) // 4) >> (halvings - 2)
    why = f"{halvings} halvings leave {left} x {left} pixels, batch norm needs 2 x 2"
    wrong += at_least(config, "growth", 1)
    wrong += at_least(config, "size", smallest, why, mend=smallest)
    wrong += at_least(config, "classes", 2)
    if wrong:
        raise ValueError("\n".join(wrong))
