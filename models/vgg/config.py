"""The keys of `model=vgg`."""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.core.problem import Problem
from models.config_ranges import at_least, each_at_least_1, probability

TASK = "classification"
"""The task that the model is trained for."""


@dataclass
class Config:
    """VGG13 (configuration B, without batch norm). The default is thin: it trains on a laptop."""

    name: str = "vgg"
    """The network: models/vgg."""
    channels: list[int] = field(default_factory=lambda: [16, 32, 64, 128, 128])
    """Channels of each stage (two convolutions and a pooling layer); [64,128,256,512,512] in the papers."""
    dense: int = 256
    """Width of the two hidden dense layers; 4096 in the papers."""
    size: int = 64
    """Width and height of an image in pixels; at least 32 with five stages (224 in the papers)."""
    classes: int = 10
    """Number of classes; the papers have 1000."""
    dropout: float = 0.5
    """Dropout probability of the hidden dense layers' outputs."""


def check(config: Config) -> list[Problem]:
    """Numbers that no model can have."""
    channels, wrong = each_at_least_1(config, "channels", "stage")
    stages = len(channels)
    left = max(config.size, 0) >> stages
    wrong += at_least(config, "dense", 1)
    wrong += at_least(config, "size", 2**stages, f"{stages} poolings leave {left} x {left} pixels", fix=2**stages)
    wrong += at_least(config, "classes", 2)
    wrong += probability(config, "dropout", fix=0.5)
    return wrong
