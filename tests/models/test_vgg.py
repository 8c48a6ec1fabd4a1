"""What VGG13 computes: the same as one written by hand; how its weights begin."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, conv2d, linear, max_pool2d, relu

from harness.nn.dropout import Dropout
from models.vgg.config import Config
from models.vgg.vgg import build

SMALL = {"channels": [4, 8, 8], "dense": 6, "size": 57, "classes": 5}


def by_hand(x: Tensor, weights: list[Tensor]) -> Tensor:
    w = iter(weights)
    for _ in range(3):
        for _ in range(2):
            x = relu(conv2d(x, next(w), next(w), padding=1))
        x = max_pool2d(x, 2)
    x = adaptive_avg_pool2d(x, 7).flatten(1)
    x = relu(linear(x, next(w), next(w)))
    return linear(relu(linear(x, next(w), next(w))), next(w), next(w))


@pytest.mark.parametrize("size", [57, 100, 8])
def test_output_and_gradients_equal_those_written_by_hand(size: int) -> None:
    """Images of 7 x 7, 12 x 12 and 1 x 1 pixels come into the average."""
    torch.manual_seed(0)
    layers = build(Config(**{**SMALL, "size": size}, dropout=0.0)).layers().double()
    weights = list(layers.parameters())
    for weight in weights:
        torch.nn.init.uniform_(weight, -0.1, 0.3)
    x = torch.randn(2, 3, size, size, dtype=torch.float64)
    found, expected = layers(x), by_hand(x, weights)
    assert found.shape == (2, 5)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    scale = torch.arange(10).view(2, 5)
    got, wanted = (torch.autograd.grad((output * scale).sum(), weights) for output in (found, expected))
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.abs().max() > 0
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_weights_begin_as_they_say() -> None:
    torch.manual_seed(0)
    state = build(Config()).layers().state_dict()
    assert state["features_22_Conv2d.weight"].std() == pytest.approx((2 / (9 * 128)) ** 0.5, rel=0.01)
    assert state["classifier_0_Linear.weight"].std() == pytest.approx(0.01, rel=0.01)
    assert all(not value.any() for name, value in state.items() if name.endswith("bias"))


def test_dropout_is_the_keyed_one() -> None:
    layers = build(Config(dropout=0.3)).layers()
    found = [(name, layer.p) for name, layer in layers.named_children() if isinstance(layer, Dropout)]
    assert found == [("classifier_2_Dropout", 0.3), ("classifier_5_Dropout", 0.3)]
