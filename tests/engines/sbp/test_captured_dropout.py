"""Dropout of captured models (`harness.capture`) on parts of a micro-batch: masks of the whole, or a note."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engines.sbp.engine import Config, build
from harness.capture.split import split
from harness.core.memory_model import MemoryModel
from harness.measure.count_model import count
from harness.sbp.device_grid import Grid
from harness.sbp.matmul_chain import chain_from_profile
from tests.engines import contract, networks
from tests.engines.contract import Case
from tests.engines.networks import Network
from tests.support.sbp_plans import flat, planned, with_strategies

pytestmark = pytest.mark.usefixtures("ranks")


class Net(nn.Module):
    """Two matmuls with dropout between and after them: of elements, of whole channels, in place."""

    def __init__(self, channels: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.first = nn.Dropout1d(0.4) if channels else nn.Dropout(0.4, inplace=True)
        self.last = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.down(torch.tanh(self.first(self.up(x)))))  # type: ignore[no-any-return]


class Functional(Net):
    """Draws in its own forward pass alone."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.dropout(torch.tanh(self.up(x)), 0.3, self.training))  # type: ignore[no-any-return]


class Turned(Net):
    """Drops elements of a tensor whose first dimension is not the samples."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.first(self.up(x).transpose(0, 1)).transpose(0, 1)))  # type: ignore[no-any-return]


class Shared(Net):
    """Calls one dropout module twice."""

    def forward(self, x: Tensor) -> Tensor:
        return self.first(self.down(torch.tanh(self.first(self.up(x)))))  # type: ignore[no-any-return]


def network(make: Callable[[], nn.Module], *shape: int) -> Network:
    def layers() -> list[nn.Module]:
        return [nn.Linear(6, 6), *split(make(), (torch.zeros(2, *shape),))]

    return Network("captured", layers, lambda n: torch.randn(n, *shape), lambda n: torch.randn(n, *shape),
                   networks._squares)  # fmt: skip


def case(model: Network, m: int = 1) -> Case:
    return Case(build(Config()), model, planned(model, 2, 8, "batch_split", m))


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("channels", [False, True])
def test_a_captured_model_has_the_masks_of_the_whole(channels: bool, m: int) -> None:
    shape = (3, 6) if channels else (6,)
    one = case(network(lambda: Net(channels), *shape), m)
    assert _noted(one) == []
    contract.check_training(one)


@pytest.mark.parametrize("make", [Functional, Turned, Shared])
def test_masks_that_are_not_those_of_the_whole_are_noted(make: Callable[[], nn.Module]) -> None:
    one = case(network(make, 3, 6))
    assert [(problem.key, problem.hint) for problem in _noted(one)] == [
        ("model", "dropout 0 there, or nn.Dropout modules")
    ]
    got, want = contract.run(one, steps=1), contract.reference(one, steps=1)
    assert got.losses != pytest.approx(want.losses, rel=1e-4)


def test_ranks_that_draw_for_themselves_draw_other_masks() -> None:
    """Equal samples on both ranks: equal masks would leave the same loss as one half has, twice."""
    half = torch.randn(4, 3, 6)
    model = network(Functional, 3, 6)
    model._inputs = lambda n: half.repeat(2, 1, 1).clone()
    model._targets = lambda n: torch.zeros(8, 3, 6)
    profile = count(model, 8, "float64")
    grid, names = Grid(1, 2), [item.name for item in chain_from_profile(profile).matmuls]
    by_samples = dict.fromkeys(names, grid.strategy((2, 1, 1)))
    plan = with_strategies(profile, flat(2), by_samples, "batch_split")
    assert plan.splits_samples_only
    one = replace(case(model), plan=plan)
    alone = network(Functional, 3, 6)
    alone._inputs, alone._targets = lambda n: half.clone(), lambda n: torch.zeros(4, 3, 6)
    want = contract.run(replace(case(alone).reference, samples=4), steps=1)
    assert contract.run(one, steps=1).losses[0] != pytest.approx(want.losses[0], rel=1e-4)


def _noted(one: Case) -> list[object]:
    here = replace(flat(2), name="local")
    profile = count(one.model, 8 // one.plan.micro_batches, "float64")
    return [*one.engine.notes(one.plan, profile, here, MemoryModel())]
