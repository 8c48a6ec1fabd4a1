"""Layers that share buffers still do so after a move."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness.nn.tied import move_apart, moved


def sharing(count: int) -> nn.Sequential:
    cache = torch.ones(4)
    layers = [nn.Linear(4, 4) for _ in range(count)]
    for layer in layers:
        layer.register_buffer("cache", cache)
    return nn.Sequential(*layers)


@pytest.mark.parametrize("to", [torch.float64, torch.device("meta")])
def test_moved_layers_share_their_buffers_as_before(to: torch.dtype | torch.device) -> None:
    layers = moved(sharing(2), to)
    assert layers[0].cache is layers[1].cache
    assert to in (layers[0].cache.dtype, layers[0].cache.device)


def test_layers_that_move_apart_share_their_buffers_on_each_device() -> None:
    meta = torch.device("meta")
    layers = [*sharing(4)]
    move_apart(layers, [3, 5, 3, 5], {3: meta, 5: meta})
    caches = [layer.cache for layer in layers]
    assert caches[0] is caches[2] and caches[1] is caches[3] and caches[0] is not caches[1]
    assert {layer.weight.device for layer in layers} == {meta}
