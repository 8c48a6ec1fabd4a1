"""What is kept whole next to what is split, against `single`: it is moved where its layer begins and ends."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.interfaces import Batch, Model
from harness.measure.count_model import count
from harness.sbp.device_grid import Grid, Strategy
from harness.sbp.matmul_chain import chain_from_profile
from harness.sbp.shortest_path import Ends
from models.classification_model import ClassificationModel
from models.densenet.config import Config
from models.densenet.densenet import build
from models.gpt.block import Block
from tests.support.sbp_plans import costs_of, flat, with_strategies
from tests.support.sbp_runs import Run, check, predicted

pytestmark = pytest.mark.usefixtures("ranks")

SAMPLES = 4
TOKENS, HIDDEN, WORDS = 5, 8, 6
BY_SAMPLES, BY_OUTPUTS, BY_INPUTS = (Grid(1, 2).strategy(numbers) for numbers in ((2, 1, 1), (1, 2, 1), (1, 1, 2)))
WANTED: dict[Ends, tuple[Strategy, ...]] = {
    "free": (BY_OUTPUTS, BY_INPUTS, BY_SAMPLES), "batch_split": (BY_INPUTS, BY_OUTPUTS, BY_SAMPLES)
}  # fmt: skip
"""Strategies of all products, the first that one can have."""


class Images(ClassificationModel):
    """Between others a convolution of groups and one with a pool after it, norms in front, and a transposed one."""

    def __init__(self) -> None:
        super().__init__("images", (2, 17, 17), 2)

    def layers(self) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2),
            nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, groups=2)),
            nn.Conv2d(4, 2, 1),
            nn.ConvTranspose2d(2, 4, 2, stride=2),
            nn.Conv2d(4, 4, 1),
            nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3), nn.MaxPool2d(2)),
            nn.Sequential(nn.Flatten(), nn.Linear(50, 2)),
        )


class Places(nn.Module):
    """Tokens and their places, looked up in two tables, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, HIDDEN), nn.Embedding(TOKENS, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(self.tokens(x) + self.places(torch.arange(TOKENS).expand_as(x)))
        return normed


class Text:
    """Two tables in one layer, and a block of GPT after them. Implements `harness.interfaces.Model`."""

    name, task, input_shape, classes = "text", "text", (TOKENS,), WORDS

    def layers(self) -> nn.Sequential:
        return nn.Sequential(Places(), Block(HIDDEN, 2, 1, 0.0, 0.0), nn.Linear(HIDDEN, WORDS))

    def sample(self, n: int) -> Batch:
        return Batch(torch.randint(WORDS, (n, TOKENS)), torch.randint(WORDS, (n, TOKENS)))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


MODELS: dict[str, Model] = {
    "images": Images(), "densenet": build(Config(blocks=[1, 1], growth=2, size=16)), "text": Text()
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_what_is_kept_whole_stands_next_to_split_ones(name: str) -> None:
    """What goes into its layer is moved before the norm at its head, what comes out after the norm at its end."""
    model = MODELS[name]
    profile = count(model, SAMPLES, "float64")
    matmuls, costs, runs = chain_from_profile(profile).matmuls, costs_of(profile, flat(2), 1), []
    for ends, wanted in WANTED.items():
        given = {item.name: next(one for one in wanted if one in costs.strategies(item)) for item in matmuls}
        plan = with_strategies(profile, flat(2), given, ends)
        assert "all_to_all@forward" in predicted(plan)
        runs.append(Run(model, plan, SAMPLES, steps=2))
    check(runs)
