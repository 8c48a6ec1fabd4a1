"""Operations of a cell, from c channels to c channels. A stride of 2 halves the side.

The order is ReLU, convolution without bias, batch norm. No ReLU works in place: several operations share an input.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.amoebanet.config import BOTTLENECK

Pair = tuple[int, int]


def convolution(
    inside: int, out: int, kernel: Pair = (1, 1), stride: Pair = (1, 1), padding: Pair = (0, 0)
) -> list[nn.Module]:
    """ReLU, convolution, batch norm: (n, inside, h, w) -> (n, out, h / stride, w / stride)."""
    return [nn.ReLU(), nn.Conv2d(inside, out, kernel, stride, padding, bias=False), nn.BatchNorm2d(out)]


def identity(channels: int, stride: int) -> nn.Module:
    """Return the identity; no cell has it with a stride."""
    return nn.Identity()


def max_3x3(channels: int, stride: int) -> nn.Module:
    """The largest of 3 x 3 pixels.

    As in the network that GPipe ran; torchgpipe's public benchmark takes the average here, with the same parameters.
    """
    return nn.MaxPool2d(3, stride, padding=1)


def max_2x2(channels: int, stride: int) -> nn.Module:
    """The largest of 2 x 2 pixels."""
    return nn.MaxPool2d(2, stride)


def average_3x3(channels: int, stride: int) -> nn.Module:
    """The mean of those of 3 x 3 pixels that are inside the image."""
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


def convolution_1x1(channels: int, stride: int) -> nn.Module:
    """c^2 + 2 c parameters."""
    return nn.Sequential(*convolution(channels, channels, stride=(stride, stride)))


def convolution_3x3(channels: int, stride: int) -> nn.Module:
    """A bottleneck of c/4 channels: 1 x 1, 3 x 3, 1 x 1. 1.0625 c^2 + 3 c parameters."""
    narrow = channels // BOTTLENECK
    return nn.Sequential(
        *convolution(channels, narrow),
        *convolution(narrow, narrow, (3, 3), (stride, stride), (1, 1)),
        *convolution(narrow, channels),
    )


def convolution_1x7_7x1(channels: int, stride: int) -> nn.Module:
    """A bottleneck of c/4 channels: 1 x 1, 1 x 7, 7 x 1, 1 x 1. 1.375 c^2 + 3.5 c parameters."""
    narrow = channels // BOTTLENECK
    return nn.Sequential(
        *convolution(channels, narrow),
        *convolution(narrow, narrow, (1, 7), (1, stride), (0, 3)),
        *convolution(narrow, narrow, (7, 1), (stride, 1), (3, 0)),
        *convolution(narrow, channels),
    )


class FactorizedReduction(nn.Module):
    """(n, inside, h, w) -> (n, out, h / 2, w / 2), for even h and w: half of the channels from one pixel of each 2 x 2.

        first  .       The first 1 x 1 convolution sees the upper left pixel of each 2 x 2, the second one the
          .  second    lower right one: its input is shifted by one pixel, with zeros at the right and at the bottom.

    inside * out + 2 out parameters.
    """

    def __init__(self, inside: int, out: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.first = nn.Conv2d(inside, out // 2, kernel_size=1, stride=2, bias=False)
        self.shift = nn.ZeroPad2d((-1, 1, -1, 1))
        self.second = nn.Conv2d(inside, out // 2, kernel_size=1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(x)
        normed: Tensor = self.norm(torch.cat([self.first(x), self.second(self.shift(x))], dim=1))
        return normed
