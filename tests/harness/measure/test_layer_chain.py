"""Errors of a chain of layers name the layer, whether layers run one at a time or as one task."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from harness.measure.layer_chain import Chain
from harness.measure.profile_model import measure
from harness.nn import dropout
from tests.support.nets import Net


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("no such thing")


class Lists(nn.Module):
    def forward(self, x: Tensor) -> list[Tensor]:
        return [x]


@pytest.mark.parametrize(("layer", "kind", "what"), [(Broken(), RuntimeError, "no such"), (Lists(), TypeError, "list")])
def test_an_error_names_the_layer(layer, kind, what):
    with pytest.raises(kind, match=what) as caught:
        measure(Net(lambda: nn.Sequential(nn.Identity(), layer), (2,)), 3, "float32", "cpu")
    assert caught.value.__notes__ == ["in layer 1 (1), on a micro-batch of 3"]
    assert torch.get_num_threads() > 0 and dropout._state.key is None


@pytest.mark.parametrize(("layer", "kind"), [(Broken(), RuntimeError), (Lists(), TypeError)])
def test_an_error_of_all_layers_as_one_task_names_the_layer(layer, kind):
    chain = Chain(Net(lambda: nn.Sequential(nn.Identity(), layer), (2,)), 3, torch.float32, torch.device("cpu"))
    with pytest.raises(kind) as caught:
        chain.whole(lambda index, phase: torch.enable_grad())
    assert caught.value.__notes__ == ["in layer 1 (1), on a micro-batch of 3"]


class BrokenBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        raise RuntimeError("no gradient")


class Endless(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return BrokenBackward.apply(super().forward(x))


def test_an_error_of_the_backward_pass_of_all_layers_says_so():
    chain = Chain(Net(lambda: nn.Sequential(Endless(2, 2)), (2,)), 3, torch.float32, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="no gradient") as caught:
        chain.whole(lambda index, phase: torch.enable_grad())
    assert caught.value.__notes__ == ["in the backward pass of all layers, on a micro-batch of 3"]
