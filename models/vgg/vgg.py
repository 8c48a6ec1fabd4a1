"""VGG13 (configuration B, without batch norm), as torchvision defines it, as a chain of elementary layers.

    stage, five times     3x3, relu - 3x3, relu - pool          s -> s/2 -> s/4 -> s/8 -> s/16 -> s/32
    then                  average to 7 x 7 - dense, relu, dropout - dense, relu, dropout - dense

The average makes the first dense layer as wide for every size of image: 512 x 7 x 7 = 25088 in the papers.

Weights begin normal: those of convolutions with variance 2 / (9 x output channels) (He), for there is no norm to set
the scale of the layers, those of dense layers with deviation 0.01. Biases begin at 0.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from torch import nn

from harness.core.problem import refuse
from harness.nn.dropout import Dropout
from models.classification_model import ClassificationModel
from models.vgg.config import Config, check

AVERAGED = 7
"""Side of the images that the dense layers see."""

Named = Iterator[tuple[str, nn.Module]]


class VGG(ClassificationModel):
    """Classifies (n, 3, size, size) images: logits, (n, classes).

    `name` says which one it is, as in "vgg_64_128_256_512_512_4096_224_1000" for VGG13 on 224 pixels with 1000
    classes. Raises `CannotRun` that names each key of `config` whose number is impossible.
    """

    def __init__(self, config: Config) -> None:
        refuse(check(config), "model=vgg")
        self.config = config
        sizes = [*config.channels, config.dense, config.size, config.classes]
        super().__init__("_".join(["vgg", *map(str, sizes)]), (3, config.size, config.size), config.classes)

    def layers(self) -> nn.Sequential:
        """Five layers for each stage, the average, and seven of the classifier; the name of each starts with its
        kind."""
        layers = nn.Sequential(OrderedDict(_layers(self.config)))
        layers.apply(_initialize)
        return layers


def _layers(config: Config) -> Named:
    yield from _numbered("features", _features(config))
    yield "avgpool_flatten", nn.Sequential(nn.AdaptiveAvgPool2d(AVERAGED), nn.Flatten())
    yield from _numbered("classifier", _classifier(config))


def _numbered(part: str, layers: Iterator[nn.Module]) -> Named:
    for index, layer in enumerate(layers):
        yield f"{part}_{index}_{type(layer).__name__}", layer


def _features(config: Config) -> Iterator[nn.Module]:
    width = 3
    for channels in config.channels:
        for inside in (width, channels):
            yield nn.Conv2d(inside, channels, kernel_size=3, padding=1)
            yield nn.ReLU()
        yield nn.MaxPool2d(2)
        width = channels


def _classifier(config: Config) -> Iterator[nn.Module]:
    for inside in (config.channels[-1] * AVERAGED**2, config.dense):
        yield nn.Linear(inside, config.dense)
        yield nn.ReLU()
        yield Dropout(config.dropout)
    yield nn.Linear(config.dense, config.classes)


def _initialize(layer: nn.Module) -> None:
    if isinstance(layer, nn.Conv2d):
        nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    elif isinstance(layer, nn.Linear):
        nn.init.normal_(layer.weight, std=0.01)
    if isinstance(layer, nn.Conv2d | nn.Linear) and layer.bias is not None:
        nn.init.zeros_(layer.bias)


def build(config: Config) -> VGG:
    """The model; raises `CannotRun` that names each key whose number is impossible."""
    return VGG(config)
