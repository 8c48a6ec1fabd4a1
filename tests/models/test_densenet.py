"""What DenseNet computes: the same as one written by hand."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, batch_norm, conv2d, linear, max_pool2d, relu

from models.densenet.config import Config
from models.densenet.densenet import build


def by_hand(x: Tensor, w: Iterator[Tensor]) -> Tensor:
    x = max_pool2d(norm_relu(conv2d(x, next(w), stride=2, padding=3), w), 3, stride=2, padding=1)
    x = dense(dense(x, w), w)
    x = avg_pool2d(conv2d(norm_relu(x, w), next(w)), 2)
    x = norm_relu(dense(x, w), w)
    return linear(x.mean((2, 3)), next(w), next(w))


def dense(x: Tensor, w: Iterator[Tensor]) -> Tensor:
    y = conv2d(norm_relu(x, w), next(w))
    return torch.cat([x, conv2d(norm_relu(y, w), next(w), padding=1)], 1)


def norm_relu(x: Tensor, w: Iterator[Tensor]) -> Tensor:
    return relu(batch_norm(x, None, None, next(w), next(w), training=True))


def test_output_and_gradients_equal_those_written_by_hand() -> None:
    torch.manual_seed(0)
    layers = build(Config(blocks=[2, 1], growth=3, size=17, classes=5)).layers().double()
    weights = list(layers.parameters())
    for weight in weights:
        if weight.dim() == 1:
            nn.init.uniform_(weight, 0.5, 1.5)
    x = torch.randn(3, 3, 17, 17, dtype=torch.float64)
    found, expected = layers(x), by_hand(x, iter(weights))
    assert found.shape == (3, 5)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    scale = torch.arange(15).view(3, 5)
    got, wanted = (torch.autograd.grad((output * scale).sum(), weights) for output in (found, expected))
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.abs().max() > 0
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_a_dense_layer_keeps_its_input_in_front() -> None:
    layers = build(Config()).layers()
    x = torch.randn(2, 16, 4, 4)
    y = layers.denseblock1_denselayer1(x)
    assert y.shape == (2, 16 + 8, 4, 4)
    assert torch.equal(y[:, :16], x)
