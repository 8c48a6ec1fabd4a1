"""Inception v3 without auxiliary head, as torchvision defines it, as a chain of blocks.

    stem                             5b 5c 5d    6a    6b 6c 6d 6e    7a    7b 7c    head
    299 > 149 > 147 > 73 > 71 > 35  ---35---  > 17  -----17-----  >  8  ---8---  > 1      side of a 299 pixel image

A block is a number of branches that read the same input; their outputs, concatenated along the channels, are its
output. Every convolution is followed by a batch norm and a ReLU. In the tables below (out, height, width) is such a
convolution; it keeps the side but for the last one of a branch in 6a and 7a, which halves it and takes the rim away.

Weights begin as torch's layers do; the batch norms set the scale.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from harness.core.problem import refuse
from harness.nn.dropout import Dropout
from models.classification_model import ClassificationModel
from models.inception.config import Config, check

Unit = tuple[int, int, int]
Named = Iterator[tuple[str, nn.Module]]


class Inception(ClassificationModel):
    """Classifies (n, 3, size, size) images: logits, (n, classes).

    `name` says which one it is, as in "inception_1_299_1000" for the undivided network on 299 pixels with 1000
    classes. Raises `CannotRun` that names each key of `config` whose number is impossible.
    """

    def __init__(self, config: Config) -> None:
        refuse(check(config), "model=inception")
        self.config = config
        name = f"inception_{config.divisor}_{config.size}_{config.classes}"
        super().__init__(name, (3, config.size, config.size), config.classes)

    def layers(self) -> nn.Sequential:
        """Five convolutions and two pools, eleven blocks and the head, by name."""
        return nn.Sequential(OrderedDict(_Builder(self.config).layers()))


class Branches(nn.Module):
    """Runs every branch on the same input and concatenates their outputs along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


class _Builder:
    """Makes the layers from first to last; `width` is what the last one gives, divided as all are."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.width = 3

    def layers(self) -> Named:
        yield "Conv2d_1a_3x3", self._stem(32, kernel=3, stride=2)
        yield "Conv2d_2a_3x3", self._stem(32, kernel=3)
        yield "Conv2d_2b_3x3", self._stem(64, kernel=3, padding=1)
        yield "maxpool1", nn.MaxPool2d(3, stride=2)
        yield "Conv2d_3b_1x1", self._stem(80, kernel=1)
        yield "Conv2d_4a_3x3", self._stem(192, kernel=3)
        yield "maxpool2", nn.MaxPool2d(3, stride=2)
        for name, pool in (("b", 32), ("c", 64), ("d", 64)):
            yield f"Mixed_5{name}", self._square(pool)
        yield "Mixed_6a", self._halve([(384, 3, 3)], [(64, 1, 1), (96, 3, 3), (96, 3, 3)])
        for name, inner in (("b", 128), ("c", 160), ("d", 160), ("e", 192)):
            yield f"Mixed_6{name}", self._factorized(inner)
        yield "Mixed_7a", self._halve([(192, 1, 1), (320, 3, 3)], [(192, 1, 1), (192, 1, 7), (192, 7, 1), (192, 3, 3)])
        yield "Mixed_7b", self._forked()
        yield "Mixed_7c", self._forked()
        yield "avgpool_fc", self._head()

    def _stem(self, out: int, kernel: int, stride: int = 1, padding: int = 0) -> nn.Module:
        inside, self.width = self.width, out // self.config.divisor
        return _convolution(inside, self.width, (kernel, kernel), stride, (padding, padding))

    def _square(self, pool: int) -> nn.Module:
        """5b, 5c, 5d: 1 x 1, 5 x 5, twice 3 x 3, and an average."""
        return self._block(
            self._branch([(64, 1, 1)]),
            self._branch([(48, 1, 1), (64, 5, 5)]),
            self._branch([(64, 1, 1), (96, 3, 3), (96, 3, 3)]),
            self._average(pool),
            out=64 + 64 + 96 + pool,
        )

    def _halve(self, first: Sequence[Unit], second: Sequence[Unit]) -> nn.Module:
        """6a, 7a: two branches of convolutions, and a maximum of the input."""
        undivided = self.width * self.config.divisor
        return self._block(
            self._branch(first, stride=2),
            self._branch(second, stride=2),
            nn.MaxPool2d(3, stride=2),
            out=first[-1][0] + second[-1][0] + undivided,
        )

    def _factorized(self, inner: int) -> nn.Module:
        """6b .. 6e: 7 x 7 as 1 x 7 and 7 x 1, once and twice."""
        across, down = (inner, 1, 7), (inner, 7, 1)
        return self._block(
            self._branch([(192, 1, 1)]),
            self._branch([(inner, 1, 1), across, (192, 7, 1)]),
            self._branch([(inner, 1, 1), down, across, down, (192, 1, 7)]),
            self._average(192),
            out=4 * 192,
        )

    def _forked(self) -> nn.Module:
        """7b, 7c: two of the branches end in 1 x 3 and 3 x 1 side by side."""
        return self._block(
            self._branch([(320, 1, 1)]),
            self._fork([(384, 1, 1)]),
            self._fork([(448, 1, 1), (384, 3, 3)]),
            self._average(192),
            out=320 + 2 * 2 * 384 + 192,
        )

    def _fork(self, units: Sequence[Unit]) -> nn.Module:
        inside = units[-1][0] // self.config.divisor
        across, down = self._branch([(384, 1, 3)], inside), self._branch([(384, 3, 1)], inside)
        return nn.Sequential(self._branch(units), Branches(across, down))

    def _average(self, out: int) -> nn.Module:
        return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), self._branch([(out, 1, 1)]))

    def _branch(self, units: Sequence[Unit], inside: int | None = None, stride: int = 1) -> nn.Sequential:
        """Convolutions one after the other on `inside` channels, else on the block's input; `stride` is the last's."""
        width, branch = inside or self.width, nn.Sequential()
        for index, (out, height, across) in enumerate(units):
            divided, strided = out // self.config.divisor, stride > 1 and index == len(units) - 1
            padding = (0, 0) if strided else (height // 2, across // 2)
            branch.append(_convolution(width, divided, (height, across), stride if strided else 1, padding))
            width = divided
        return branch

    def _block(self, *branches: nn.Module, out: int) -> nn.Module:
        self.width = out // self.config.divisor
        return Branches(*branches)

    def _head(self) -> nn.Module:
        dropout, dense = Dropout(self.config.dropout), nn.Linear(self.width, self.config.classes)
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), dropout, nn.Flatten(), dense)


def _convolution(inside: int, out: int, kernel: tuple[int, int], stride: int, padding: tuple[int, int]) -> nn.Module:
    convolution = nn.Conv2d(inside, out, kernel, stride, padding, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(out, eps=0.001), nn.ReLU())


def build(config: Config) -> Inception:
    """The model; raises `CannotRun` that names each key whose number is impossible."""
    return Inception(config)
