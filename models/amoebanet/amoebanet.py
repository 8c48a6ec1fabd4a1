"""AmoebaNet-D (L, D), the network of torchgpipe's section 4.2.1 and of GPipe, as a sequence of L + 6 layers.

    layer                   c of the cell   channels out   side
    stem1   3 x 3, stride 2       -            D/4         s/2
    stem2   reduction cell       D/2           3 c         s/4
    stem3   reduction cell        D            3 c         s/8
    cell1   L/3 normal cells      D            4 c         s/8      cell1_normal1, cell1_normal2, ...
    cell2   reduction cell       2 D           3 c         s/16
    cell3   L/3 normal cells     2 D           4 c         s/16
    cell4   reduction cell       4 D           3 c         s/32
    cell5   L/3 normal cells     4 D           4 c         s/32
    classify                      -          classes        1       mean over all pixels, then a linear layer

From stem2 to classify a pair goes from layer to layer: the output of a cell, and what it got as the output of the cell
before it. The 3 x 3 max pools take the maximum, as in the network that GPipe ran; torchgpipe's public code takes the
average there, with the same parameters.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain

from torch import Tensor, nn

from harness.core.problem import refuse
from models.amoebanet.cell import NORMAL, REDUCTION, Cell, Kind
from models.amoebanet.config import GROUPS, SHRINK, Config, check
from models.amoebanet.operations import convolution
from models.classification_model import ClassificationModel

RGB = 3


class AmoebaNet(ClassificationModel):
    """Classifies (n, 3, size, size) images: logits (n, classes).

    `name` says which one it is, as in "amoebanet_18_256_224" for L=18, D=256 and 224 pixels. Raises `CannotRun` that
    names each key of `config` whose number is impossible.
    """

    def __init__(self, config: Config) -> None:
        refuse(check(config), "model=amoebanet")
        self.config = config
        name = f"amoebanet_{config.layers}_{config.channels}_{config.size}"
        super().__init__(name, (RGB, config.size, config.size), config.classes)

    def layers(self) -> nn.Sequential:
        """The L + 6 layers by name, freshly initialized; on the meta device they cost no memory."""
        return nn.Sequential(OrderedDict(_layers(self.config)))


class Classify(nn.Module):
    """A pair -> (n, classes): the mean over all side x side pixels of the first tensor, then a linear layer."""

    def __init__(self, inside: int, side: int, classes: int) -> None:
        super().__init__()
        self.pool = nn.AvgPool2d(side)
        self.flatten = nn.Flatten()
        self.linear = nn.Linear(inside, classes)

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        logits: Tensor = self.linear(self.flatten(self.pool(value[0])))
        return logits


def _layers(config: Config) -> Iterator[tuple[str, nn.Module]]:
    stem = config.channels // 4
    yield "stem1", nn.Sequential(*convolution(RGB, stem, (3, 3), (2, 2), (1, 1)))
    channels, last, earlier, reduced = stem, stem, stem, False
    for name, kind in _kinds(config.layers // GROUPS):
        channels *= kind.stride
        yield name, Cell(kind, channels, last, earlier, reduced)
        earlier, last, reduced = last, len(kind.joined) * channels, kind is REDUCTION
    yield "classify", Classify(last, config.size // SHRINK, config.classes)


def _kinds(length: int) -> Iterator[tuple[str, Kind]]:
    """The cells by name, with groups of `length` normal ones."""
    normal = [[(f"cell{number}_normal{k}", NORMAL) for k in range(1, length + 1)] for number in (1, 3, 5)]
    first = [("stem2", REDUCTION), ("stem3", REDUCTION)]
    yield from chain(
        first, normal[0], [("cell2_reduction", REDUCTION)], normal[1], [("cell4_reduction", REDUCTION)], normal[2]
    )


def build(config: Config) -> AmoebaNet:
    """The model; raises `CannotRun` that names each key whose number is impossible."""
    return AmoebaNet(config)
