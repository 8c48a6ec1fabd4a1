"""How the layers of a model suit a pipeline: cuts at its blocks, and the balance of two stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from harness.capture import torchvision_import
from harness.cli.compose import compose
from harness.config import registry
from harness.interfaces import Model
from tests.any_model import reference
from tests.any_model.cases import Case


@dataclass(frozen=True)
class Chain:
    """How many layers there are, how many repeated blocks the module has, how many of them are whole in a layer, and
    the most that one layer has."""

    layers: int
    blocks: int
    whole: int
    most: int

    @property
    def cut_at_every_block(self) -> bool:
        """Whether no two blocks share a layer; one may be in several layers, for the balance."""
        return self.most == 1 and self.whole >= self.blocks - 1


def of(case: Case) -> Chain:
    """The chain of a case, on the meta device."""
    torchvision_import.prepare()
    model: Model = registry.build("model", compose(["engine=single", *case.keys]).model)
    with torch.device("meta"):
        chain = model.layers()
    counts = [_blocks(layer, case) for layer in chain]
    return Chain(len(chain), _blocks(reference.made(case)[0], case), sum(counts), max(counts))


def _blocks(module: nn.Module, case: Case) -> int:
    return sum(type(one).__name__ == case.block for one in module.modules())


def imbalance(costs: Sequence[float]) -> float:
    """How much longer than the mean the slower of two stages takes, where the layers are cut best: 0.2 is 20 %."""
    total = sum(costs)
    slower = (max(sum(costs[:place]), total - sum(costs[:place])) for place in range(len(costs)))
    return min(slower) / total * 2 - 1
