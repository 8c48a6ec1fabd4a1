"""What every session begins with and ends in."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness.interfaces import OptimizerSpec
from harness.runtime.training_state import (
    OPTIMIZERS,
    load_optimizer_state,
    make_optimizer,
    optimizer_state,
    optimizer_tensors,
    use_tf32,
)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_nothing_does_nothing(name: str) -> None:
    """Of a stage without parameters: no session has to ask whether there is one."""
    optimizer = make_optimizer([], OptimizerSpec(name, lr=0.1, momentum=0.9 if name == "sgd" else 0.0))
    optimizer.step()
    load_optimizer_state({}, [optimizer], {})
    assert optimizer_state({}, [optimizer]) == {}
    assert optimizer_tensors([optimizer]) == []


def test_an_optimizer_takes_its_numbers_and_its_parameters_once() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = make_optimizer(iter([weight]), OptimizerSpec("sgd", lr=0.5, momentum=0.9, weight_decay=0.1))
    for _ in range(2):
        weight.grad = torch.ones(2)
        optimizer.step()
    first = 1 - 0.5 * (1 + 0.1)
    second = first - 0.5 * (0.9 * 1.1 + 1 + 0.1 * first)
    torch.testing.assert_close(weight.detach(), torch.full((2,), second))


@pytest.mark.parametrize("allowed", [True, False])
def test_convolutions_and_matmuls_of_float32_have_one_precision(allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's default is TF32 for the ones alone, so that one peak could be that of neither."""
    for place in (torch.backends.cuda.matmul, torch.backends.cudnn):
        monkeypatch.setattr(place, "allow_tf32", place.allow_tf32)  # as it was, afterwards
    use_tf32(allowed)
    assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is allowed
