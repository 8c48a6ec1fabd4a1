"""How the layers of a model suit a pipeline: cuts at its blocks, and the balance of two stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from harness.capture import names, torchvision_import
from harness.cli.compose import compose
from harness.config import registry
from harness.interfaces import Model
from tests.any_model import reference
from tests.any_model.cases import Case


@dataclass(frozen=True)
class Chain:
    """How many layers there are, how many repeated blocks the module has, how many of them are in one layer each, and
    the most that one layer has parts of."""

    layers: int
    blocks: int
    whole: int
    most: int

    @property
    def cut_at_every_block(self) -> bool:
        """Whether no two blocks share a layer; one may be in several layers, for the balance."""
        return self.most == 1 and self.whole >= self.blocks - 1


def of(case: Case) -> Chain:
    """The chain of a case, on the meta device: where the weights of its blocks are."""
    torchvision_import.prepare()
    model: Model = registry.build("model", compose(["engine=single", *case.keys]).model)
    with torch.device("meta"):
        chain = model.layers()
    module = reference.made(case)[0]
    blocks = [path for path, one in module.named_modules() if type(one).__name__ == case.block]
    held = {(place.partition(".")[0], name.removeprefix("network.")) for place, name in names(chain).items()}
    homes = {block: {layer for layer, name in held if name.startswith(f"{block}.")} for block in blocks}
    each = Counter(layer for layers in homes.values() for layer in layers)
    return Chain(len(chain), len(blocks), sum(len(layers) == 1 for layers in homes.values()), max(each.values()))


def imbalance(costs: Sequence[float]) -> float:
    """How much longer than the mean the slower of two stages takes, where the layers are cut best: 0.2 is 20 %."""
    total = sum(costs)
    slower = (max(sum(costs[:place]), total - sum(costs[:place])) for place in range(len(costs)))
    return min(slower) / total * 2 - 1
