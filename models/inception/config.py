"""The keys of `model=inception`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from models.limits import at_least, probability

if TYPE_CHECKING:
    from models.inception.inception import Inception

DIVISORS = (1, 2, 4, 8, 16)
SMALLEST = 107
"""Side of the smallest image of which 2 x 2 pixels are left at the end."""
TASK = "classification"
"""What it is trained for."""


@dataclass
class Config:
    """Inception v3 without auxiliary head. The default is thin: it trains on a laptop."""

    name: str = "inception"
    """The network: models/inception."""
    divisor: int = 8
    """Every width is divided by it: 1 (the papers' network), 2, 4, 8 or 16."""
    size: int = 128
    """Side of the square image in pixels; at least 107 (299 in the papers)."""
    classes: int = 10
    """What an image may show; 1000 in the papers."""
    dropout: float = 0.5
    """Probability that an input of the last layer is zeroed in training."""


def build(config: Config) -> Inception:
    """The model; raises ValueError that names each key whose number is impossible."""
    from models.inception.inception import Inception

    return Inception(config)


def check(config: Config) -> None:
    """Raise ValueError with a line, `key   what   -> mend`, for each impossible number."""
    wrong = []
    if config.divisor not in DIVISORS:
        wrong.append(
            f"model.divisor {config.divisor}   is not one of {', '.join(map(str, DIVISORS))}: "
            "all widths are multiples of 16   -> model.divisor=8"
        )
    left = side(config.size)
    why = f"{left} x {left} pixels are left at the end, batch norm needs 2 x 2"
    wrong += at_least(config, "size", SMALLEST, why, mend=SMALLEST)
    wrong += at_least(config, "classes", 2)
    wrong += probability(config, "dropout", mend=0.5)
    if wrong:
        raise ValueError("\n".join(wrong))


def side(size: int) -> int:
    """Pixels on a side of the last blocks' images: five halvings and two convolutions that take the rim away."""
    for rim in (0, 2, 2, 0, 0):
        size = max(0, (size - rim - 1) // 2)
    return size
