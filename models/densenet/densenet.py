"""DenseNet with bottlenecks, as torchvision defines it, as a chain of dense layers.

    dense layer     x -+- norm, relu, 1x1 (4k) - norm, relu, 3x3 (k) -.
    of growth k        `---------------------------------------------(concat)-> k channels more

One tensor passes between two layers of the chain: all that the block has made so far. Between two blocks a transition
halves the channels and the side.

Weights begin as torch's layers do; a batch norm in front of each convolution sets the scale.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from harness.core.problem import refuse
from models.classification_model import ClassificationModel
from models.densenet.config import Config, check

Named = Iterator[tuple[str, nn.Module]]


class DenseNet(ClassificationModel):
    """Classifies (n, 3, size, size) images: logits, (n, classes).

    `name` says which one it is, as in "densenet_6_12_24_16_32_224_1000" for DenseNet-121 on 224 pixels with 1000
    classes. Raises `CannotRun` that names each key of `config` whose number is impossible.
    """

    def __init__(self, config: Config) -> None:
        refuse(check(config), "model=densenet")
        self.config = config
        sizes = [*config.blocks, config.growth, config.size, config.classes]
        super().__init__("_".join(["densenet", *map(str, sizes)]), (3, config.size, config.size), config.classes)

    def layers(self) -> nn.Sequential:
        """Stem, pool, the dense layers with transitions between the blocks, norm and head, by name."""
        return nn.Sequential(OrderedDict(_layers(self.config)))


class DenseLayer(nn.Module):
    """(n, inside, h, w) -> (n, inside + growth, h, w): the input first, then what is new."""

    def __init__(self, inside: int, growth: int) -> None:
        super().__init__()
        middle = 4 * growth
        self.new = nn.Sequential(
            *_normalized(inside),
            nn.Conv2d(inside, middle, kernel_size=1, bias=False),
            *_normalized(middle),
            nn.Conv2d(middle, growth, kernel_size=3, padding=1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.new(x)], dim=1)


def _layers(config: Config) -> Named:
    width, last = 2 * config.growth, len(config.blocks)
    yield "conv0_norm0_relu0", nn.Sequential(nn.Conv2d(3, width, 7, 2, padding=3, bias=False), *_normalized(width))
    yield "pool0", nn.MaxPool2d(3, stride=2, padding=1)
    for block, dense_layers in enumerate(config.blocks, start=1):
        for index in range(1, dense_layers + 1):
            yield f"denseblock{block}_denselayer{index}", DenseLayer(width, config.growth)
            width += config.growth
        if block < last:
            yield f"transition{block}", _transition(width)
            width //= 2
    yield f"norm{last + 1}_relu", nn.Sequential(*_normalized(width))
    yield "avgpool_fc", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, config.classes))


def _transition(width: int) -> nn.Sequential:
    """(n, width, h, w) -> (n, width / 2, h / 2, w / 2), rounded down."""
    shrink = nn.Conv2d(width, width // 2, kernel_size=1, bias=False)
    return nn.Sequential(*_normalized(width), shrink, nn.AvgPool2d(2))


def _normalized(width: int) -> list[nn.Module]:
    return [nn.BatchNorm2d(width), nn.ReLU()]


def build(config: Config) -> DenseNet:
    """The model; raises `CannotRun` that names each key whose number is impossible."""
    return DenseNet(config)
