"""Marks tell how far a backward pass has come, and leave its gradients alone."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from harness.marks import mark


def test_marks_are_reached_from_the_last_one_to_the_first() -> None:
    layers, reached = [nn.Linear(3, 3) for _ in range(3)], list[int]()
    inputs, gradients = torch.rand(2, 3), list[torch.Tensor | None]()
    for marked in (False, True):
        x = inputs.clone().requires_grad_()
        value: torch.Tensor = x
        for number, layer in enumerate(layers):
            value = layer(value)
            if marked:
                mark((torch.zeros(1), "a word", value, value), partial(reached.append, number))
        value.sum().backward()
        gradients.append(x.grad)
    assert reached == [2, 1, 0]
    assert gradients[0] is not None and gradients[1] is not None
    assert torch.equal(gradients[0], gradients[1])


def test_what_needs_no_gradient_has_no_mark() -> None:
    tensor = torch.rand(2)
    mark(tensor, lambda: None)
    mark((1, None, tensor), lambda: None)
    assert tensor._backward_hooks is None
