"""What mlp computes: products with its weights, and a ReLU between any two."""

from __future__ import annotations

import torch

from models.mlp.config import Config
from models.mlp.mlp import build


def test_output_equals_that_written_by_hand() -> None:
    torch.manual_seed(0)
    model = build(Config(widths=[6, 5, 4, 3]))
    layers, batch = model.layers(), model.sample(7)
    assert [name for name, _ in layers.named_children()] == ["linear_0", "relu_0", "linear_1", "relu_1", "linear_2"]
    first, second, third = layers.parameters()
    x = (batch.inputs @ first.T).clamp(min=0)
    x = (x @ second.T).clamp(min=0) @ third.T
    torch.testing.assert_close(layers(batch.inputs), x)
    assert (batch.inputs.shape, model.input_shape, model.classes, model.task) == ((7, 6), (6,), 3, "classification")


def test_two_widths_are_one_layer() -> None:
    assert len(build(Config(widths=[6, 3])).layers()) == 1
