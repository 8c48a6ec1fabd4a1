"""Layers that a recomputation must not disturb: the gradients and the state are those of the layers alone."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from engines.gpipe.gpipe_module import GPipe
from tests.engines.stateful_layers import LAYERS, WIDTH, AddOne
from tests.support.gpipe_drivers import DRIVERS

MODES = ["never", "except_last", "always"]


def check(layers: nn.Sequential, balance: list[int], chunks: int, mode: str, driver: str, steps: int = 2) -> None:
    """Gradients and buffers after some steps, against the layers alone, micro-batch after micro-batch."""
    plain = layers.double()
    pipe = GPipe(copy.deepcopy(plain), balance, ["cpu"] * len(balance), chunks, mode)
    for step in range(steps):
        x = torch.randn(2 * chunks + step, WIDTH, dtype=torch.float64)
        x[: len(x) // 2, 0] = -1.0
        for part in x.clone().tensor_split(chunks):
            (plain(part) ** 2).sum().backward()
        (DRIVERS[driver](pipe, x.clone()) ** 2).sum().backward()
    mine = dict(pipe.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(mine[name].grad, parameter.grad, rtol=1e-9, atol=1e-9, msg=name)
    buffers = dict(pipe.named_buffers())
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(buffers[name], buffer, rtol=1e-9, atol=1e-9, msg=name)
    pipe.close()


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_is_recomputed_as_it_was(layer: Callable[[], nn.Module], mode: str, driver: str) -> None:
    torch.manual_seed(0)
    check(nn.Sequential(nn.Linear(WIDTH, WIDTH), layer(), nn.Linear(WIDTH, WIDTH)), [1, 2], 4, mode, driver)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_layers_are_recomputed_as_they_were(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    chosen = data.draw(st.lists(st.sampled_from(LAYERS), min_size=1, max_size=4))
    layers = [nn.Linear(WIDTH, WIDTH), *(make() for make in chosen), nn.Linear(WIDTH, WIDTH)]
    first = data.draw(st.integers(1, len(layers) - 1))
    chunks, mode, driver = (
        data.draw(st.integers(1, 4)),
        data.draw(st.sampled_from(MODES)),
        data.draw(st.sampled_from([*DRIVERS])),
    )
    check(nn.Sequential(*layers), [first, len(layers) - first], chunks, mode, driver)


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_recomputation_does_not_write_to_the_callers_tensor(driver: str) -> None:
    x = torch.randn(4, WIDTH)
    before = x.clone()
    pipe = GPipe(nn.Sequential(AddOne(), nn.Linear(WIDTH, WIDTH)), [1, 1], ["cpu"] * 2, 2, "always")
    DRIVERS[driver](pipe, x).sum().backward()
    assert torch.equal(x, before)


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_frozen_parameter_that_the_forward_pass_changes_is_refused(driver: str) -> None:
    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.code = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            self.code.mul_(0.5)
            return x * self.code

    pipe = GPipe(nn.Sequential(nn.Linear(WIDTH, WIDTH), Codebook()), [1, 1], ["cpu"] * 2, 2, "always")
    with pytest.raises(RuntimeError, match="'code' of Codebook") as raised:
        DRIVERS[driver](pipe, torch.ones(4, WIDTH))
    assert any("stage 1" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_recomputation_that_does_something_else_is_refused(driver: str) -> None:
    class Switched(nn.Module):
        on = False

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if Switched.on:
                self.count += 1
            return x * 2

    pipe = GPipe(nn.Sequential(nn.Linear(WIDTH, WIDTH), Switched()), [1, 1], ["cpu"] * 2, 2, "always")
    loss = DRIVERS[driver](pipe, torch.ones(4, WIDTH)).sum()
    Switched.on = True
    with pytest.raises(RuntimeError, match="'count' of Switched"):
        loss.backward()
