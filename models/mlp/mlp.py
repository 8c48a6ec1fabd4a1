"""Dense layers without bias in a row, a ReLU between any two.

    64 -> linear_0 -> 128 -> relu_0 -> linear_1 -> 128 -> relu_1 -> linear_2 -> 10

Weights begin as torch's layers do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import pairwise

from torch import nn

from harness.core.problem import refuse
from models.classification_model import ClassificationModel
from models.mlp.config import Config, check


class MLP(ClassificationModel):
    """Classifies (n, widths[0]) numbers: logits, (n, widths[-1]).

    `name` says which one it is, as in "mlp_64_128_128_10". Raises `CannotRun` that names each key of `config` whose
    number is impossible.
    """

    def __init__(self, config: Config) -> None:
        refuse(check(config), "model=mlp")
        self.config = config
        super().__init__("_".join(["mlp", *map(str, config.widths)]), (config.widths[0],), config.widths[-1])

    def layers(self) -> nn.Sequential:
        """The dense layers and ReLUs by name."""
        return nn.Sequential(OrderedDict(_layers(self.config)))


def _layers(config: Config) -> Iterator[tuple[str, nn.Module]]:
    for index, (inside, out) in enumerate(pairwise(config.widths)):
        if index:
            yield f"relu_{index - 1}", nn.ReLU()
        yield f"linear_{index}", nn.Linear(inside, out, bias=False)


def build(config: Config) -> MLP:
    """The model; raises `CannotRun` that names each key whose number is impossible."""
    return MLP(config)
