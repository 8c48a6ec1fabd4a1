"""What U-Net computes: the same numbers as a U-Net written out by hand, dropout, skips, loss, sample."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from harness.nn.dropout import Dropout, keyed, number
from harness.nn.skip import carried
from models.unet.config import Config
from models.unet.unet import PopConcatenate, Stash, build


def by_hand(x: Tensor, parameters: Sequence[Tensor], convs: int) -> Tensor:
    """The same network as a recursive function, without dropout; takes the weights in the order of the layers."""
    weights = list(parameters)

    def cell(x: Tensor) -> Tensor:
        for _ in range(convs):
            x = functional.conv2d(x, weights.pop(0), padding=1)
            mean = x.mean((2, 3), keepdim=True)
            x = (x - mean) / (x.var((2, 3), correction=0, keepdim=True) + 1e-5).sqrt()
            x = torch.where(x > 0, x, 0.01 * x)
        return x

    def level(x: Tensor, depth: int) -> Tensor:
        if depth == 5:
            return cell(x)
        skip = cell(x)
        below = level(functional.max_pool2d(skip, 2), depth + 1)
        below = below.repeat_interleave(2, 2).repeat_interleave(2, 3)
        padded = torch.zeros(*below.shape[:2], *skip.shape[2:], dtype=x.dtype)
        padded[:, :, : below.shape[2], : below.shape[3]] = below
        return cell(torch.cat([padded, skip], 1))

    return functional.conv2d(level(x, 0), weights.pop(0))


@pytest.mark.parametrize("convs, size", [(1, 64), (2, 64), (3, 70)])
def test_output_and_gradients_equal_those_written_by_hand(convs: int, size: int) -> None:
    torch.manual_seed(0)
    model = build(Config(convs=convs, channels=2, size=size, dropout=0.0))
    layers, batch = model.layers().double(), model.sample(2)
    inputs, targets = batch.inputs.double(), batch.targets.double()
    output = layers(inputs)
    assert output.shape == (2, 1, size, size)
    weights = list(layers.parameters())
    expected = by_hand(inputs, weights, convs)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-10)
    got = torch.autograd.grad(model.loss(output, targets), weights)
    wanted = torch.autograd.grad(model.loss(expected, targets), weights)
    for (name, _), mine, theirs in zip(layers.named_parameters(), got, wanted, strict=True):
        assert mine.abs().max() > 0, name
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-10)


def test_dropout_zeroes_whole_channels_with_keyed_masks() -> None:
    layers = build(Config(convs=1, channels=8, size=64, dropout=0.5)).layers()
    number(layers)
    drops = [layer for layer in layers if isinstance(layer, Dropout)]
    assert len(drops) == 11 and all((layer.p, layer.channels) == (0.5, True) for layer in drops)
    x = torch.ones(4, 32, 3, 3)
    with keyed(seed=0, step=0, micro_batch=0):
        first, again, other = drops[0](x), drops[0](x), drops[1](x)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert {tuple(channel.unique().tolist()) for channel in first.flatten(0, 1)} == {(0.0,), (2.0,)}


def test_a_stashed_tensor_is_not_overwritten() -> None:
    model = build(Config(convs=2, channels=2, size=64))
    layers = model.layers()
    seen: dict[str, Tensor] = {}
    for layer in layers:
        if isinstance(layer, Stash):
            layer.register_forward_hook(lambda m, _, out: seen.update({m.stashes[0]: out.clone()}))
    below = [name for name, _ in layers.named_children()].index("decoder_0_up")
    with carried({}) as skips:
        layers[:below](model.sample(2).inputs)
        assert sorted(skips) == ["skip_0", "skip_1", "skip_2", "skip_3", "skip_4"]
        assert all(torch.equal(skips[name], seen[name]) for name in skips)


def test_pop_pads_with_zeros_and_puts_the_skip_after() -> None:
    below = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[None, None]
    skip = torch.full((1, 1, 3, 3), 9.0)
    with carried({"skip_0": skip}) as left:
        joined = PopConcatenate("skip_0")(below)
    assert joined[0].tolist() == [
        [[1, 2, 0],
         [3, 4, 0],
         [0, 0, 0]],
        [[9, 9, 9],
         [9, 9, 9],
         [9, 9, 9]],
    ]  # fmt: skip
    assert left == {}


def test_loss_is_the_sum_of_the_samples_means() -> None:
    model = build(Config())
    logits = torch.tensor([0.0, 2.0, -1.0])[:, None, None, None].expand(3, 1, 4, 4)
    ones, zeros = torch.ones(3, 1, 4, 4), torch.zeros(3, 1, 4, 4)
    assert model.loss(logits, ones).item() == pytest.approx(0.693147 + 0.126928 + 1.313262, abs=1e-5)
    assert model.loss(logits, zeros).item() == pytest.approx(0.693147 + 2.126928 + 0.313262, abs=1e-5)
    parts = [model.loss(logits[i : i + 1], ones[:1]) for i in range(3)]
    torch.testing.assert_close(sum(parts), model.loss(logits, ones))


def test_sample_is_drawn_from_torchs_generator() -> None:
    model = build(Config(size=64))
    torch.manual_seed(3)
    first, second = model.sample(2), model.sample(2)
    torch.manual_seed(3)
    assert torch.equal(model.sample(2).inputs, first.inputs) and not torch.equal(first.inputs, second.inputs)
    assert first.inputs.shape == (2, *model.input_shape) == (2, 3, 64, 64)
    assert torch.equal(first.targets, torch.ones(2, 1, 64, 64))


def test_each_layer_can_be_cut_off_and_run_twice() -> None:
    """No layer changes its input, which may be a leaf of the graph, and none carries state from call to call."""
    layers = build(Config(convs=1, channels=2, size=64, dropout=0.0)).layers()
    assert not list(layers.buffers())
    x = torch.randn(2, 3, 64, 64)
    with carried({}) as skips:
        for name, layer in layers.named_children():
            before = dict(skips)
            leaf = x.clone().requires_grad_()
            first = layer(leaf)
            assert torch.equal(leaf, x), name
            skips.update(before)
            assert torch.equal(layer(leaf), first), name
            x = first.detach()
