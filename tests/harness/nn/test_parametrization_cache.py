"""Parametrized weights that are cached: for each task by itself, with the gradients of the layers alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from engines.gpipe.gpipe_module import GPipe
from engines.myelin.checkpointed_stage import SegmentedStage
from harness.nn import parametrization_cache
from harness.nn.skip import named_layers
from tests.support.gpipe_drivers import DRIVERS


@pytest.fixture(autouse=True)
def torchs_own_counter() -> Iterator[None]:
    yield
    parametrize._cache_enabled = 0
    parametrize._cache = {}


class CachedInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = weight_norm(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return self.inner(self.inner(x))  # type: ignore[no-any-return]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(CachedInside(), weight_norm(nn.Linear(4, 4)), CachedInside(), nn.Linear(4, 4)).double()


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
def test_cached_around_the_call(mode: str, driver: str) -> None:
    plain = layers()
    pipe = GPipe(copy.deepcopy(plain), [2, 2], ["cpu"] * 2, 3, mode)
    x = torch.randn(6, 4, dtype=torch.float64)
    plain(x).sin().sum().backward()
    parametrization_cache.use(pipe.modules())
    with parametrize.cached():
        before = plain[1].weight
        DRIVERS[driver](pipe, x).sin().sum().backward()
        assert plain[1].weight.equal(before)
        assert parametrize._cache_enabled
    assert not parametrize._cache_enabled
    torch.testing.assert_close(gradients(pipe), gradients(plain), rtol=1e-12, atol=1e-12)


def test_cached_around_segments() -> None:
    plain = layers()
    split = copy.deepcopy(plain)
    stage = SegmentedStage(0, named_layers(split), 0, [], [(0, 1), (2, 3)])
    x = torch.randn(6, 4, dtype=torch.float64)
    plain(x).sin().sum().backward()
    with parametrize.cached():
        loss = stage(x.clone().requires_grad_()).sin().sum()
    loss.backward()
    torch.testing.assert_close(gradients(split), gradients(plain), rtol=1e-12, atol=1e-12)
