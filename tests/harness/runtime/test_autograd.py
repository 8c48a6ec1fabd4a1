"""A first node for in-place layers, calls from a backward pass, and the search for the layer that fails."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from harness.runtime.autograd import failing_layer, non_leaf, on_backward


def test_a_backward_pass_calls_from_the_last_layer_to_the_first() -> None:
    layers, reached = [nn.Linear(3, 3) for _ in range(3)], list[int]()
    inputs, gradients = torch.rand(2, 3), list[torch.Tensor | None]()
    for watched in (False, True):
        x = inputs.clone().requires_grad_()
        value: torch.Tensor = x
        for number, layer in enumerate(layers):
            value = layer(value)
            if watched:
                on_backward((torch.zeros(1), "a word", value, value), partial(reached.append, number))
        value.sum().backward()
        gradients.append(x.grad)
    assert reached == [2, 1, 0]
    assert gradients[0] is not None and gradients[1] is not None
    assert torch.equal(gradients[0], gradients[1])


def test_what_needs_no_gradient_calls_nothing() -> None:
    tensor = torch.rand(2)
    on_backward(tensor, lambda: None)
    on_backward((1, None, tensor), lambda: None)
    assert tensor._backward_hooks is None


def test_a_leaf_may_be_changed_in_place_and_its_gradient_is_contiguous() -> None:
    leaf = torch.rand(2, 3, requires_grad=True)
    entered = non_leaf(leaf)
    kept = leaf.detach().clone()
    (entered.relu_().t() * 2.0).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.is_contiguous()
    assert torch.equal(leaf.grad, 2.0 * (kept > 0))
    plain = torch.rand(2)
    assert non_leaf(plain) is plain


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError


class Failing(nn.Module):
    """Its backward pass fails in the call with that number."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.call, self.calls = call, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return Fails.apply(x) if self.calls == self.call else x * 1.0  # type: ignore[no-any-return]


@pytest.mark.parametrize(("call", "name"), [(1, "first"), (2, "again"), (3, "unknown")])
def test_the_layer_whose_backward_pass_fails(call: int, name: str) -> None:
    """Also where one module stands in two places; afterwards no layer has a hook left."""
    twice = Failing(call)
    layers: list[tuple[str, nn.Module]] = [
        ("linear", nn.Linear(2, 2)),
        ("first", twice),
        ("tanh", nn.Tanh()),
        ("again", twice),
        ("last", nn.Linear(2, 2)),
    ]
    leaf = torch.rand(1, 2, requires_grad=True)

    def run() -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        value = leaf
        for _, layer in layers:
            value = layer(value)
        return [(value, torch.ones_like(value)), (torch.zeros(1), torch.zeros(1)), (value, None)]

    assert failing_layer(layers, run, [leaf]) == name
    assert not any(layer._forward_hooks for _, layer in layers)
    assert all(parameter.grad is None for _, layer in layers for parameter in layer.parameters())


class HookFails(nn.Module):
    """The backward pass fails in a hook of its output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def fail(gradient: torch.Tensor) -> None:
            raise ZeroDivisionError

        y = x * 1.0
        y.register_hook(fail)
        return y


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_layer_whose_output_has_a_hook_that_fails(number: int) -> None:
    layers: list[tuple[str, nn.Module]] = [(str(n), HookFails() if n == number else nn.Tanh()) for n in range(3)]
    leaf = torch.rand(1, 2, requires_grad=True)

    def run() -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        value = leaf
        for _, layer in layers:
            value = layer(value)
        return [(value, torch.ones_like(value))]

    assert failing_layer(layers, run, [leaf]) == str(number)
