"""The keys of `model=vgg`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.vgg.vgg import VGG

TASK = "classification"
"""What it is trained for."""


@dataclass
class Config:
    """VGG13 (configuration B, without batch norm). The default is thin: it trains on a laptop."""

    name: str = "vgg"
    """The network: models/vgg."""
    channels: list[int] = field(default_factory=lambda: [16, 32, 64, 128, 128])
    """Channels of each stage, two convolutions and a pool; [64,128,256,512,512] in the papers."""
    dense: int = 256
    """Width of the two inner dense layers; 4096 in the papers."""
    size: int = 64
    """Side of the square image in pixels; at least 32 with five stages (224 in the papers)."""
    classes: int = 10
    """What an image may show; 1000 in the papers."""
    dropout: float = 0.5
    """Probability that an output of the inner dense layers is zeroed in training."""


def build(config: Config) -> VGG:
    """The model; raises ValueError that names each key whose number is impossible."""
    from models.vgg.vgg import VGG

    return VGG(config)


def check(config: Config) -> None:
    """Raise ValueError with a line, `key   what   -> mend`, for each impossible number."""
    channels = [max(1, width) for width in config.channels] or [16, 32, 64, 128, 128]
    stages = len(channels)
    wrong = []
    if config.channels != channels:
        wrong.append(
            f"model.channels {config.channels}   must be one number of at least 1 for each stage   "
            f"-> model.channels={channels}".replace(", ", ",")
        )
    if config.dense < 1:
        wrong.append(f"model.dense {config.dense}   must be at least 1   -> model.dense=256")
    if config.size < 2**stages:
        left = max(config.size, 0) >> stages
        wrong.append(
            f"model.size {config.size}   must be at least {2**stages}: {stages} poolings leave {left} x {left} "
            f"pixels   -> model.size={2**stages}"
        )
    if config.classes < 2:
        wrong.append(f"model.classes {config.classes}   must be at least 2   -> model.classes=10")
    if not 0 <= config.dropout < 1:
        wrong.append(f"model.dropout {config.dropout}   must be at least 0 and below 1   -> model.dropout=0.5")
    if wrong:
        raise ValueError("\n".join(wrong))
