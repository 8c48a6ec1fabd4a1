"""What ResNet computes: the same as one written by hand; the same in blocks and in elementary layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, conv2d, linear, max_pool2d, relu

from harness.nn.skip import layer_skips, named_layers
from models.resnet.config import Config
from models.resnet.resnet import build

SMALL = {"blocks": [2, 1, 2], "channels": 3, "size": 17, "classes": 5}


def layers_of(cut: str) -> nn.Sequential:
    """Same weights for both cuts; those of norms are far from 0, so that every gradient counts."""
    torch.manual_seed(0)
    layers = build(Config(**SMALL, cut=cut)).layers().double()
    for parameter in layers.parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return layers


def outcome(output: Tensor, weights: list[nn.Parameter]) -> list[Tensor]:
    """The output, and the gradients of a loss that weighs all outputs differently."""
    return [output, *torch.autograd.grad((output * torch.arange(output.numel()).view_as(output)).sum(), weights)]


def by_hand(x: Tensor, w: Iterator[Tensor]) -> Tensor:
    x = max_pool2d(relu(norm(conv2d(x, next(w), stride=2, padding=3), w)), 3, stride=2, padding=1)
    x = bottleneck(x, w, 1, fitted=True)
    x = bottleneck(x, w, 1, fitted=False)
    x = bottleneck(x, w, 2, fitted=True)
    x = bottleneck(x, w, 2, fitted=True)
    x = bottleneck(x, w, 1, fitted=False)
    return linear(x.mean((2, 3)), next(w), next(w))


def bottleneck(x: Tensor, w: Iterator[Tensor], stride: int, fitted: bool) -> Tensor:
    y = relu(norm(conv2d(x, next(w)), w))
    y = relu(norm(conv2d(y, next(w), stride=stride, padding=1), w))
    y = norm(conv2d(y, next(w)), w)
    if fitted:
        x = norm(conv2d(x, next(w), stride=stride), w)
    return relu(x + y)


def norm(x: Tensor, w: Iterator[Tensor]) -> Tensor:
    return batch_norm(x, None, None, next(w), next(w), training=True)


def test_both_cuts_equal_the_network_written_by_hand() -> None:
    x = torch.randn(3, 3, 17, 17, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = {}
    for cut in ("block", "layer"):
        layers = layers_of(cut)
        weights = list(layers.parameters())
        found[cut] = outcome(layers(x), weights)
        expected = outcome(by_hand(x, iter(weights)), weights)
        for mine, theirs in zip(found[cut], expected, strict=True):
            assert mine.abs().max() > 0
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    assert all(torch.equal(block, layer) for block, layer in zip(found["block"], found["layer"], strict=True))


def test_a_state_dict_differs_in_the_prefix_alone() -> None:
    blocks, flat = layers_of("block").state_dict(), layers_of("layer").state_dict()
    assert [tuple(value.shape) for value in blocks.values()] == [tuple(value.shape) for value in flat.values()]
    assert "layer1_0.residual.fit.0.weight" in blocks and "layer1_0_residual.fit.0.weight" in flat


def test_each_bottleneck_of_the_flat_sequence_has_a_skip() -> None:
    """In ResNet-101 the first of 33 bottlenecks begins after 4 layers; each has 11."""
    with torch.device("meta"):
        layers = named_layers(build(Config(blocks=[3, 4, 23, 3], channels=64, size=224, cut="layer")).layers())
    skips = [(skip.source, skip.target) for skip in layer_skips(layers)]
    assert skips == [(4 + 11 * k, 4 + 11 * k + 9) for k in range(33)]
    names = [name for name, _ in layers]
    assert names[:6] == ["conv1", "bn1", "relu", "maxpool", "layer1_0_identity", "layer1_0_conv1"]
    assert names[-5:] == ["layer4_2_residual", "layer4_2_relu3", "avgpool", "flatten", "fc"]


def test_a_new_bottleneck_is_its_shortcut() -> None:
    layers = build(Config()).layers()
    x = torch.randn(2, 64, 8, 8)
    assert torch.equal(layers.layer1_1(x), relu(x))
