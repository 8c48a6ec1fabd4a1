"""A chain computes what its module computes, for any number of samples, and has cuts where they are expected."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness.capture import split, verify
from tests.harness.capture.networks import NETWORKS


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_and_gradients_are_those_of_the_module(name: str) -> None:
    module, args, kwargs = NETWORKS[name]()
    verify(module, split(module, args, kwargs), args, kwargs)


class Table(nn.Module):
    """Takes a tensor for its dtype alone, as rotary embeddings do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.arange(8, device=x.device).to(x.dtype).cos()


class Tabled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.table = nn.Linear(8, 8), Table()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        factor = self.table(x)
        for block in self.blocks:
            x = block(x) * factor
        return x


def test_a_constant_of_a_module_comes_after_what_the_module_takes() -> None:
    module, x = Tabled(), torch.randn(3, 8)
    verify(module, split(module, (x,)), (x,))
