"""ResNet with bottlenecks, as torchvision defines it, as a chain of bottlenecks or of elementary layers.

    bottleneck     x -+- 1x1, norm, relu - 3x3 (stride), norm, relu - 1x1, norm - (+) - relu
    of m channels     |      w -> m              m -> m               m -> 4m      |
                      `------------ as it is, or 1x1 (stride) and norm ------------'

The shortcut is a skip: the first layer of a bottleneck stashes it, its last but one pops, fits and adds it. With
`model.cut=block` a bottleneck is one layer of the chain and the skip stays within it; with `model.cut=layer` each of
its 11 layers is one of the chain, as in torchgpipe's speed benchmark: ResNet-101 has 370 layers then.

Weights begin as torch's layers do, but for those of a bottleneck's last norm: they begin at 0, so that it begins as its
shortcut (Goyal et al., "Accurate, large minibatch SGD", section 5.1). Without this, small batches diverge at first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

from harness.core.problem import refuse
from harness.nn.skip import Skippable, Stash
from models.classification_model import ClassificationModel
from models.resnet.config import Config, check

EXPANSION = 4
"""A bottleneck's output channels for each inner one."""


class ResNet(ClassificationModel):
    """Classifies (n, 3, size, size) images: logits, (n, classes).

    `name` says which one it is, as in "resnet_3_4_6_3_64_224_1000" for ResNet-50 on 224 pixels with 1000 classes;
    "_layers" is added with cut=layer. Raises ValueError that names each key of `config` whose value is impossible.
    """

    def __init__(self, config: Config) -> None:
        refuse(check(config), "model=resnet")
        self.config = config
        sizes = [*config.blocks, config.channels, config.size, config.classes]
        name = "_".join(["resnet", *map(str, sizes), *["layers"] * (config.cut == "layer")])
        super().__init__(name, (3, config.size, config.size), config.classes)

    def layers(self) -> nn.Sequential:
        """The layers by name; both cuts have the same parameters in the same order."""
        chain: OrderedDict[str, nn.Module] = OrderedDict()
        for part in _parts(self.config):
            if self.config.cut == "layer":
                chain.update((part.prefix + name, layer) for name, layer in part.layers.items())
            else:
                chain[part.name] = nn.Sequential(part.layers)
        return nn.Sequential(chain)


class Residual(Skippable):
    """(n, c, h, w) -> (n, c, h, w): adds the shortcut `name`, which `fit` brings to this shape."""

    def __init__(self, name: str, fit: nn.Module) -> None:
        super().__init__()
        self.pops = (name,)
        self.fit = fit

    def forward(self, x: Tensor) -> Tensor:
        shortcut: Tensor = self.fit(self.pop(self.pops[0]))
        return x + shortcut


class _Part(NamedTuple):
    """A layer of the chain with cut=block, and its elementary layers; `prefix` makes their names unique."""

    name: str
    prefix: str
    layers: OrderedDict[str, nn.Module]


def _parts(config: Config) -> Iterator[_Part]:
    width = config.channels
    stem = OrderedDict(conv1=_conv(3, width, 7, 2), bn1=nn.BatchNorm2d(width), relu=nn.ReLU())
    yield _Part("conv1_bn_relu", "", stem)
    yield _Part("maxpool", "", OrderedDict(maxpool=nn.MaxPool2d(3, stride=2, padding=1)))
    for stage, blocks in enumerate(config.blocks):
        inner = config.channels << stage
        for block in range(blocks):
            name, stride = f"layer{stage + 1}_{block}", 2 if stage and not block else 1
            yield _Part(name, f"{name}_", _bottleneck(name, width, inner, stride))
            width = EXPANSION * inner
    head = OrderedDict(avgpool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), fc=nn.Linear(width, config.classes))
    yield _Part("avgpool_fc", "", head)


def _bottleneck(name: str, width: int, inner: int, stride: int) -> OrderedDict[str, nn.Module]:
    out, last_norm = EXPANSION * inner, nn.BatchNorm2d(EXPANSION * inner)
    nn.init.zeros_(last_norm.weight)
    fit: nn.Module = nn.Identity()
    layers: OrderedDict[str, nn.Module] = OrderedDict(identity=Stash(name))
    layers |= OrderedDict(conv1=_conv(width, inner, 1), bn1=nn.BatchNorm2d(inner), relu1=nn.ReLU())
    layers |= OrderedDict(conv2=_conv(inner, inner, 3, stride), bn2=nn.BatchNorm2d(inner), relu2=nn.ReLU())
    layers |= OrderedDict(conv3=_conv(inner, out, 1), bn3=last_norm)
    if stride > 1 or width != out:
        fit = nn.Sequential(_conv(width, out, 1, stride), nn.BatchNorm2d(out))
    return layers | OrderedDict(residual=Residual(name, fit), relu3=nn.ReLU())


def _conv(inside: int, out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inside, out, kernel, stride, padding=kernel // 2, bias=False)


def build(config: Config) -> ResNet:
    """The model; raises `CannotRun` that names each key whose number is impossible."""
    return ResNet(config)
