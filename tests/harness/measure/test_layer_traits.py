"""What layers do that some engines cannot run, seen without weights and with them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.core.model_profile import ModelProfile
from harness.core.traits import Given, Traits
from harness.measure.count_model import count
from harness.measure.profile_model import measure
from harness.nn.dropout import Dropout
from tests.support.nets import Net


class Both(nn.Module):
    """Gives two tensors that share memory."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x[:, :2]


class InPlace(nn.Module):
    inplace = True

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        pair[1].add_(1.0)
        return pair[0]


class Lookup(nn.Linear):
    """Has many lists in a list."""

    def __init__(self, lists: int) -> None:
        super().__init__(4, 4)
        self.table = [[number] for number in range(lists)]


class Hidden(nn.Module):
    """Calls a layer that it does not hold, or uses its weight."""

    def __init__(self, other: nn.Linear, call: bool) -> None:
        super().__init__()
        self.other, self.call = [other], call

    def forward(self, x: Tensor) -> Tensor:
        return self.other[0](x) if self.call else x @ self.other[0].weight


class Writing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.mul_(0.5)
        return super().forward(x)


class Transposed(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.weight = nn.Parameter(torch.randn(inputs, outputs).t())


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.order = nn.Parameter(torch.tensor([2, 0, 1, 3]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x[:, self.order]) * self.weight, n=4)


class Choosing(nn.Module):
    """Gives numbers, and which of them is the largest; holds weights that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.bare, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.scale, x.argmax(1)


class First(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0]


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.none, self.bias = nn.Parameter(torch.ones(0, 4)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias + (x @ self.none.t()).sum(1, keepdim=True)


class Drawing(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "torch":
            return x * torch.rand(1)
        return x * (random.random() if self.kind == "python" else np.random.rand())


class Complex(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(x)


class Real(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.ifft(x).real


class Moving(nn.Linear):
    """Its bias gets other memory."""

    def forward(self, x: Tensor) -> Tensor:
        self.bias.data = 0.5 * self.bias.data
        return super().forward(x)


class Reentrant(nn.Linear):
    """Its weight is seen in a backward pass of its own alone."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(super().forward, x, use_reentrant=True)
        return y


def hidden(call: bool) -> nn.Sequential:
    first = nn.Linear(4, 4)
    return nn.Sequential(first, Hidden(first, call))


def same_memory() -> nn.Sequential:
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight.data = one.weight.data
    return nn.Sequential(one, other)


FLOAT, WHOLE = Given("float32", True), Given("int64", False)
CASES: dict[str, tuple[Any, list[Traits]]] = {
    "plain": (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), [Traits((FLOAT,)), Traits((FLOAT,))]),
    "in place": (
        lambda: nn.Sequential(nn.Linear(4, 4), Both(), InPlace()),
        [Traits((FLOAT,)), Traits((FLOAT, FLOAT)), Traits((FLOAT,), in_place=1)],
    ),
    "a layer of another": (lambda: hidden(True), [Traits((FLOAT,)), Traits((FLOAT,), uses=("0",))]),
    "a weight of another": (lambda: hidden(False), [Traits((FLOAT,)), Traits((FLOAT,), uses=("0.weight",))]),
    "changed": (lambda: nn.Sequential(Writing(4, 4)), [Traits((FLOAT,), changes=("0.weight",))]),
    "moved": (lambda: nn.Sequential(Moving(4, 4)), [Traits((FLOAT,), changes=("0.bias",))]),
    "unused": (
        lambda: nn.Sequential(Choosing(), First()),
        [
            Traits((FLOAT, WHOLE), scalars=("0.scale",), unused=("0.bare.weight", "0.bare.bias")),
            Traits((FLOAT,)),
        ],
    ),
    "reentrant": (
        lambda: nn.Sequential(nn.Linear(4, 4), Reentrant(4, 4)),
        [Traits((FLOAT,)), Traits((FLOAT,))],
    ),
    "random": (
        lambda: nn.Sequential(nn.Linear(4, 4), Drawing("python"), Drawing("numpy"), Drawing("torch")),
        [
            Traits((FLOAT,)),
            Traits((FLOAT,), draws=True),
            Traits((FLOAT,), draws=True),
            Traits((FLOAT,), whole_draws=True),
        ],
    ),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Sequential(Dropout(), nn.AlphaDropout())),
        [Traits((FLOAT,)), Traits((FLOAT,)), Traits((FLOAT,), whole_draws=True)],
    ),
    "many objects": (
        lambda: nn.Sequential(Lookup(9_000), nn.Sequential(Lookup(11_000))),
        [Traits((FLOAT,)), Traits((FLOAT,), too_large="'table' of Lookup")],
    ),
    "empty": (lambda: nn.Sequential(Empty()), [Traits((FLOAT,), empty=("0.none",))]),
    "complex": (
        lambda: nn.Sequential(nn.Linear(4, 4), Complex(), Real()),
        [Traits((FLOAT,)), Traits((Given("complex64", True),)), Traits((FLOAT,))],
    ),
    "strided": (
        lambda: nn.Sequential(Transposed(4, 4), nn.Linear(4, 1)),
        [Traits((FLOAT,), strided=("0.weight",)), Traits((FLOAT,))],
    ),
    "complex weights": (
        lambda: nn.Sequential(nn.Linear(4, 4), Spectrum()),
        [Traits((FLOAT,)), Traits((FLOAT,), complex=("1.weight",), integers=("1.order",))],
    ),
}


def profiles(build: Any, task: str = "segmentation") -> list[ModelProfile]:
    model = Net(build, (4,), task)
    return [count(model, 2, "float32"), measure(model, 2, "float32", "cpu", repeats=1)]


@pytest.mark.parametrize("name", CASES)
def test_traits(name: str) -> None:
    build, wanted = CASES[name]
    for profile in profiles(build):
        assert [layer.traits for layer in profile.layers] == wanted
        assert profile.same_memory == ()


def test_weights_that_show_the_same_memory() -> None:
    assert {profile.same_memory for profile in profiles(same_memory)} == {(("0.weight", "1.weight"),)}


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({"max_norm": 1.0}, Traits((FLOAT,), max_norm=True, changes=("0.weight",))),
        ({"sparse": True}, Traits((FLOAT,), sparse=("0.weight",))),
    ],
)
def test_embeddings(keys: dict[str, Any], wanted: Traits) -> None:
    for profile in profiles(lambda: nn.Sequential(nn.Embedding(11, 4, **keys), nn.Linear(4, 4)), "text"):
        assert profile.layers[0].traits == wanted
