"""What Inception v3 computes: the same as one written by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, batch_norm, conv2d, linear, max_pool2d, relu

from harness.nn.dropout import Dropout, keyed, number
from models.inception.config import Config, side
from models.inception.inception import build

Weights = Iterator[Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small layers are slow with several threads where other processes compute, too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def unit(x: Tensor, w: Weights, stride: int = 1, padding: tuple[int, int] | int = 0) -> Tensor:
    x = conv2d(x, next(w), stride=stride, padding=padding)
    return relu(batch_norm(x, None, None, next(w), next(w), training=True, eps=0.001))


def across(x: Tensor, w: Weights, kernel: int = 7) -> Tensor:
    return unit(x, w, padding=(0, kernel // 2))


def down(x: Tensor, w: Weights, kernel: int = 7) -> Tensor:
    return unit(x, w, padding=(kernel // 2, 0))


def average(x: Tensor, w: Weights) -> Tensor:
    return unit(avg_pool2d(x, 3, 1, 1), w)


def mixed_5(x: Tensor, w: Weights) -> Tensor:
    a = unit(x, w)
    b = unit(unit(x, w), w, padding=2)
    c = unit(unit(unit(x, w), w, padding=1), w, padding=1)
    return torch.cat([a, b, c, average(x, w)], 1)


def mixed_6a(x: Tensor, w: Weights) -> Tensor:
    a = unit(x, w, stride=2)
    b = unit(unit(unit(x, w), w, padding=1), w, stride=2)
    return torch.cat([a, b, max_pool2d(x, 3, 2)], 1)


def mixed_6(x: Tensor, w: Weights) -> Tensor:
    a = unit(x, w)
    b = down(across(unit(x, w), w), w)
    c = across(down(across(down(unit(x, w), w), w), w), w)
    return torch.cat([a, b, c, average(x, w)], 1)


def mixed_7a(x: Tensor, w: Weights) -> Tensor:
    a = unit(unit(x, w), w, stride=2)
    b = unit(down(across(unit(x, w), w), w), w, stride=2)
    return torch.cat([a, b, max_pool2d(x, 3, 2)], 1)


def mixed_7(x: Tensor, w: Weights) -> Tensor:
    parts = [unit(x, w)]
    b = unit(x, w)
    parts += [across(b, w, 3), down(b, w, 3)]
    c = unit(unit(x, w), w, padding=1)
    parts += [across(c, w, 3), down(c, w, 3)]
    return torch.cat([*parts, average(x, w)], 1)


def by_hand(x: Tensor, w: Weights) -> Tensor:
    x = max_pool2d(unit(unit(unit(x, w, stride=2), w), w, padding=1), 3, 2)
    x = max_pool2d(unit(unit(x, w), w), 3, 2)
    x = mixed_6a(mixed_5(mixed_5(mixed_5(x, w), w), w), w)
    x = mixed_7a(mixed_6(mixed_6(mixed_6(mixed_6(x, w), w), w), w), w)
    return linear(mixed_7(mixed_7(x, w), w).mean((2, 3)), next(w), next(w))


def test_output_and_gradients_equal_those_written_by_hand() -> None:
    torch.manual_seed(0)
    layers = build(Config(divisor=16, size=107, classes=5, dropout=0.0)).layers().double()
    weights = list(layers.parameters())
    for weight in weights:
        if weight.dim() == 1:
            nn.init.uniform_(weight, 0.5, 1.5)
    x = torch.randn(2, 3, 107, 107, dtype=torch.float64)
    found, expected = layers(x), by_hand(x, iter(weights))
    assert found.shape == (2, 5)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    scale = torch.arange(10).view(2, 5)
    got, wanted = (torch.autograd.grad((output * scale).sum(), weights) for output in (found, expected))
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.abs().max() > 0
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-8)


def test_dropout_is_keyed_and_in_front_of_the_last_layer() -> None:
    layers = build(Config(divisor=16, size=107)).layers()
    number(layers)
    assert [module.p for module in layers.modules() if isinstance(module, Dropout)] == [0.5]
    x = torch.rand(2, 128, 2, 2)
    with keyed(seed=0, step=0, micro_batch=0):
        first, again = layers.avgpool_fc(x), layers.avgpool_fc(x)
    with keyed(seed=0, step=0, micro_batch=1):
        other = layers.avgpool_fc(x)
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_sides_of_the_last_blocks() -> None:
    """8 for 299 pixels, in the paper's table 1; 75 is the smallest that a forward pass without batch norm takes."""
    assert [side(size) for size in (-5, 74, 75, 106, 107, 299, 1000)] == [0, 0, 1, 1, 2, 8, 29]
