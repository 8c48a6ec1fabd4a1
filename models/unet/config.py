"""The keys of `model=unet`."""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.problem import Problem
from models.config_ranges import at_least, probability

DEPTH = 5
"""Encoders, and decoders: each encoder halves the side of the image."""
TASK = "segmentation"
"""The task that the model is trained for."""


@dataclass
class Config:
    """U-Net (B, C) of torchgpipe's section 4.2. The default is small: it trains on a laptop."""

    name: str = "unet"
    """The network: models/unet."""
    convs: int = 2
    """B, the number of convolutions in a cell."""
    channels: int = 16
    """C, the channels of the first cell; an even number."""
    size: int = 128
    """Width and height of an image in pixels; at least 64."""
    dropout: float = 0.1
    """Dropout probability of a convolution's output channels."""


def check(config: Config) -> list[Problem]:
    """Numbers that no model can have."""
    smallest, left = 2 * 2**DEPTH, config.size >> DEPTH
    wrong = at_least(config, "convs", 1, fix=1)
    if config.channels < 2 or config.channels % 2:
        even = max(2, config.channels + config.channels % 2)
        message = "must be an even number of at least 2, the last cell has half of it"
        wrong.append(Problem("model.channels", config.channels, message, ({"model.channels": even},)))
    why = f"{DEPTH} poolings leave {left} x {left} pixels, instance norm needs 2 x 2"
    wrong += at_least(config, "size", smallest, why, fix=smallest)
    wrong += probability(config, "dropout", fix=0.1)
    return wrong
