"""Tuples of tensors that share memory on their way from stage to stage: as in the layers alone, or refused by name."""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engines.gpipe.gpipe_module import GPipe
from tests.support.gpipe_drivers import DRIVERS

MODES = ["never", "except_last", "always"]
Pair = namedtuple("Pair", "a b")


class Call(nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(value)


def in_place_on_first(value: tuple[Tensor, Tensor]) -> Tensor:
    a, b = value
    return a.mul_(2) * b  # type: ignore[no-any-return]


def in_place_on_second(value: tuple[Tensor, Tensor]) -> Tensor:
    value[1].mul_(3)
    return value[0] * 1


def passed_on(value: Any) -> Any:
    return value


def layers(*functions: Callable[[Any], Any]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), *map(Call, functions), nn.Linear(4, 4)).double()


def gradients(module: nn.Module, run: Callable[[Tensor], Any]) -> list[Tensor | None]:
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4).requires_grad_()
    run(x * 1).sin().sum().backward()
    return [x.grad, *(parameter.grad for parameter in module.parameters())]


EQUAL = {
    "one tensor twice": (lambda x: (x, x), in_place_on_first),
    "through a stage": (lambda x: (x, x), passed_on, in_place_on_first),
    "tensors apart": (lambda x: (x[:, :2] * 1, x[:, 2:]), lambda v: torch.cat([v[0].add_(1), v[1]], 1)),
    "overlapping, and only read": (lambda x: (x, x[:, :2]), passed_on, lambda v: v[0] * v[1].mean(1, keepdim=True)),
    "a namedtuple": (lambda x: Pair(x, 2 * x), lambda v: v.a * v.b),
    "torch's named tuple": (lambda x: x.max(1, keepdim=True), lambda v: v.values.expand(-1, 4) + v.indices),
}
REFUSED = {
    "a view": (lambda x: (x, x[:, :2]), in_place_on_second),
    "a view through a stage": (lambda x: (x, x[:, :2]), passed_on, in_place_on_second),
    "a detached one": (lambda x: (x, x.detach()), in_place_on_second),
}


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", EQUAL)
def test_like_the_layers_alone(case: str, mode: str, driver: str) -> None:
    plain = layers(*EQUAL[case])
    pipe = GPipe(copy.deepcopy(plain), [1] * len(plain), ["cpu"] * len(plain), 3, mode)
    expected = gradients(plain, plain)
    found = gradients(pipe, lambda x: DRIVERS[driver](pipe, x))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", REFUSED)
def test_a_change_in_place_of_what_overlaps_is_refused(case: str, mode: str, driver: str) -> None:
    split = layers(*REFUSED[case])
    last = len(split) - 2
    pipe = GPipe(split, [1] * len(split), ["cpu"] * len(split), 3, mode)
    with pytest.raises(RuntimeError, match=f"layer '{last}' works in place on one of two tensors") as raised:
        gradients(pipe, lambda x: DRIVERS[driver](pipe, x))
    assert any(f"stage {last}" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("driver", DRIVERS)
def test_inputs_of_the_pipeline_share_memory(driver: str) -> None:
    """One tensor as both inputs, and two that overlap."""
    plain = nn.Sequential(Call(in_place_on_first), nn.Linear(4, 4)).double()
    pipe = GPipe(copy.deepcopy(plain), [1, 1], ["cpu"] * 2, 2, "always")
    expected = gradients(plain, lambda x: plain((x, x)))
    torch.testing.assert_close(gradients(pipe, lambda x: DRIVERS[driver](pipe, (x, x))), expected)
    with pytest.raises(RuntimeError, match="layer '0' works in place on one of two"):
        gradients(pipe, lambda x: DRIVERS[driver](pipe, (x, x.detach())))


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_dict_between_stages_is_refused_with_its_layer(driver: str) -> None:
    pipe = GPipe(layers(lambda x: {"a": x}, lambda v: v["a"]), [2, 2], ["cpu"] * 2, 2)
    with pytest.raises(TypeError, match="the output of layer '1' must be a tensor or a tuple of tensors, got dict"):
        DRIVERS[driver](pipe, torch.ones(4, 4, dtype=torch.float64))
