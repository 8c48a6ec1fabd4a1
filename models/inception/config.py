"""The keys of `model=inception`."""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.problem import Problem
from models.config_ranges import at_least, probability

DIVISORS = (1, 2, 4, 8, 16)
SMALLEST = 107
"""Side of the smallest image of which 2 x 2 pixels are left at the end."""
TASK = "classification"
"""The task that the model is trained for."""


@dataclass
class Config:
    """Inception v3 without auxiliary head. The default is thin: it trains on a laptop."""

    name: str = "inception"
    """The network: models/inception."""
    divisor: int = 8
    """Divides every width: 1 (the papers' network), 2, 4, 8 or 16."""
    size: int = 128
    """Width and height of an image in pixels; at least 107 (299 in the papers)."""
    classes: int = 10
    """Number of classes; the papers have 1000."""
    dropout: float = 0.5
    """Dropout probability of the last layer's input."""


def check(config: Config) -> list[Problem]:
    """Numbers that no model can have."""
    wrong = []
    if config.divisor not in DIVISORS:
        message = f"is not one of {', '.join(map(str, DIVISORS))}: all widths are multiples of 16"
        wrong.append(Problem("model.divisor", config.divisor, message, ({"model.divisor": 8},)))
    left = side(config.size)
    why = f"{left} x {left} pixels are left at the end, batch norm needs 2 x 2"
    wrong += at_least(config, "size", SMALLEST, why, fix=SMALLEST)
    wrong += at_least(config, "classes", 2)
    wrong += probability(config, "dropout", fix=0.5)
    return wrong


def side(size: int) -> int:
    """Pixels on a side of the last blocks' images: five halvings and two convolutions that take the rim away."""
    for rim in (0, 2, 2, 0, 0):
        size = max(0, (size - rim - 1) // 2)
    return size
