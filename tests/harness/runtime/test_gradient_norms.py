"""The norms of gradients that an optimizer uses up."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from harness.runtime.gradient_norms import PART, UpdateNorms


def updated(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, *gradient: float) -> None:
    parameter.grad = torch.tensor(gradient, dtype=parameter.dtype)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def test_they_are_known_after_the_step_by_name_and_of_unnamed_vectors() -> None:
    one, flat = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in (one, flat)]
    updates = UpdateNorms(optimizers, {one: "linear_0.weight"})
    updated(optimizers[0], one, 3.0, 4.0)
    updated(optimizers[1], flat, 0.0, 2.0)
    assert updates.norms() == {"linear_0.weight": 5.0, PART: 2.0}
    updates.begin()
    assert updates.norms() == {}


@pytest.mark.parametrize("order", [(1.0, 2.0), (2.0, 1.0), (math.nan, 1.0), (1.0, math.nan), (math.inf, math.nan)])
def test_of_several_updates_the_largest_counts(order: tuple[float, ...]) -> None:
    one = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([one], lr=0.1)
    updates = UpdateNorms([optimizer], {one: "a"})
    for value in order:
        updated(optimizer, one, value)
    found = updates.norms()["a"]
    assert math.isnan(found) if any(map(math.isnan, order)) else found == 2.0


def test_squares_that_overflow_are_no_infinite_norm() -> None:
    one = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([one], lr=0.1)
    updates = UpdateNorms([optimizer], {one: "a"})
    updated(optimizer, one, *[1e30] * 4)
    assert updates.norms()["a"] == pytest.approx(2e30)
