"""U-Net (B, C), the network of torchgpipe's sections 4.1 and 4.2, as one flat sequence of layers.

    side   channels                                                            channels into the cell
    s      3 -> encoder 0 -> C   --skip_0----------------------> decoder 4 -> C/2 -> segment -> 1
    s/2         encoder 1 -> 2C  --skip_1--------------> decoder 3 -> C          (8C at level 2: 4C up, 4C skip)
    s/4         encoder 2 -> 4C  --skip_2------> decoder 2 -> 2C
    s/8         encoder 3 -> 8C  --skip_3-> decoder 1 -> 4C
    s/16        encoder 4 -> 16C --skip_4-> decoder 0 -> 8C
    s/32             bottleneck 16C -> 32C -> 16C

Encoder i ends in a max pool, decoder k works on level i = 4 - k and begins with nearest up-sampling. Each of the 11
cells has B blocks of four layers, so the sequence has 44 B + 21 layers.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.core.problem import refuse
from harness.interfaces import Batch
from harness.nn.dropout import Dropout
from harness.nn.skip import Skippable, Stash
from models.unet.config import DEPTH, TASK, Config, check

Named = Iterator[tuple[str, nn.Module]]


class UNet:
    """Segments (n, 3, size, size) images: one logit for each pixel, (n, 1, size, size).

    Implements `harness.interfaces.Model`. `name` says which one it is, as in "unet_5_64_192" for B=5, C=64 and
    192 pixels. Raises `CannotRun` that names each key of `config` whose number is impossible.
    """

    task = TASK
    classes = 0

    def __init__(self, config: Config) -> None:
        refuse(check(config), "model=unet")
        self.config = config
        self.name = f"unet_{config.convs}_{config.channels}_{config.size}"
        self.input_shape: tuple[int, ...] = (3, config.size, config.size)

    def layers(self) -> nn.Sequential:
        """The 44 B + 21 layers by name, freshly initialized; on the meta device they cost no memory."""
        return nn.Sequential(OrderedDict(_layers(self.config)))

    def sample(self, n: int) -> Batch:
        """n images of normal noise whose pixels all belong to the object, as in torchgpipe's benchmark."""
        return Batch(torch.randn(n, *self.input_shape), torch.ones(n, 1, *self.input_shape[1:]))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Binary cross entropy with logits: the mean over a sample's pixels, summed over the samples."""
        total = functional.binary_cross_entropy_with_logits(output, target, reduction="sum")
        return total / math.prod(output.shape[1:])


class PopConcatenate(Skippable):
    """(n, c, h, w) -> (n, c + d, H, W): pads with zeros to the skip's (n, d, H, W), appends the skip."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.pops = (name,)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.pop(self.pops[0])
        rows, columns = skip.shape[2] - x.shape[2], skip.shape[3] - x.shape[3]
        if rows or columns:
            x = functional.pad(x, [columns // 2, columns - columns // 2, rows // 2, rows - rows // 2])
        return torch.cat([x, skip], dim=1)


def _layers(config: Config) -> Named:
    c, b, p = config.channels, config.convs, config.dropout
    width = 3
    for i in range(DEPTH):
        yield from _cell(f"encoder_{i}_encode", width, c << i, c << i, b, p)
        yield f"encoder_{i}_skip", Stash(f"skip_{i}")
        yield f"encoder_{i}_down", nn.MaxPool2d(2)
        width = c << i
    yield from _cell("bottleneck_0", width, 2 * width, width, b, p)
    for k, i in enumerate(reversed(range(DEPTH))):
        yield f"decoder_{k}_up", nn.Upsample(scale_factor=2)
        yield f"decoder_{k}_skip", PopConcatenate(f"skip_{i}")
        yield from _cell(f"decoder_{k}_decode", c << (i + 1), (c << i) // 2, (c << i) // 2, b, p)
    yield "segment", nn.Conv2d(c // 2, 1, kernel_size=1, bias=False)


def _cell(name: str, inside: int, middle: int, out: int, convs: int, dropout: float) -> Named:
    """`convs` blocks: inside -> middle -> ... -> middle -> out; a single one goes from inside to out."""
    widths = [inside, *[middle] * (convs - 1), out]
    for k, (before, after) in enumerate(pairwise(widths)):
        yield f"{name}_{k}_conv", nn.Conv2d(before, after, kernel_size=3, padding=1, bias=False)
        yield f"{name}_{k}_dropout", Dropout(dropout, channels=True)
        yield f"{name}_{k}_norm", nn.InstanceNorm2d(after)
        yield f"{name}_{k}_relu", nn.LeakyReLU(0.01)


def build(config: Config) -> UNet:
    """The model; raises `CannotRun` that names each key whose number is impossible."""
    return UNet(config)
