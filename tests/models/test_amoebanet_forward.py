"""What AmoebaNet-D computes: the same numbers as one written out by hand; pools, pairs, training."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from models.amoebanet.amoebanet import build
from models.amoebanet.config import Config
from models.amoebanet.operations import FactorizedReduction, average_3x3, max_2x2, max_3x3

Pair = tuple[int, int]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small kernels gain nothing by more, and lose much where other processes compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class ByHand:
    """AmoebaNet-D with one normal cell in each group; takes the weights in the order of the layers."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.weights = list(parameters)

    def __call__(self, x: Tensor) -> Tensor:
        x = self.conv(x, 2, (1, 1))
        after_1 = self.reduction(x, x, shrunk=False)
        after_2 = self.reduction(after_1, x, shrunk=True)
        after_3 = self.normal(after_2, after_1, shrunk=True)
        after_4 = self.reduction(after_3, after_2, shrunk=False)
        after_5 = self.normal(after_4, after_3, shrunk=True)
        after_6 = self.reduction(after_5, after_4, shrunk=False)
        after_7 = self.normal(after_6, after_5, shrunk=True)
        weight, bias = self.weights
        return after_7.mean((2, 3)) @ weight.T + bias

    def normal(self, last: Tensor, earlier: Tensor, shrunk: bool) -> Tensor:
        zero = self.conv(last)
        one = self.matched(earlier, zero, shrunk)
        two = self.conv(one) + largest(one, 3, 1)
        three = one + self.deep(zero)
        four = self.conv(zero) + self.deep(zero)
        five = largest(two, 3, 1) + two
        six = average(one) + self.conv(five)
        return torch.cat([zero, three, four, six], 1)

    def reduction(self, last: Tensor, earlier: Tensor, shrunk: bool) -> Tensor:
        zero = self.conv(last)
        one = self.matched(earlier, zero, shrunk)
        two = largest(zero, 2, 2) + largest(zero, 3, 2)
        three = two + self.conv(self.conv(self.conv(one), 2, (1, 1)))
        four = self.deep(two) + largest(two, 3, 1)
        five = three + largest(one, 2, 2)
        six = average(two) + self.conv(three)
        return torch.cat([four, five, six], 1)

    def matched(self, earlier: Tensor, like: Tensor, shrunk: bool) -> Tensor:
        if shrunk:
            x = torch.where(earlier > 0, earlier, 0)
            upper_left, lower_right = self.weights.pop(0), self.weights.pop(0)
            return self.norm(torch.cat([functional.conv2d(x[:, :, ::2, ::2], upper_left),
                                        functional.conv2d(x[:, :, 1::2, 1::2], lower_right)], 1))  # fmt: skip
        return earlier if earlier.shape == like.shape else self.conv(earlier)

    def deep(self, x: Tensor) -> Tensor:
        return self.conv(self.conv(self.conv(self.conv(x), padding=(0, 3)), padding=(3, 0)))

    def conv(self, x: Tensor, stride: int = 1, padding: Pair = (0, 0)) -> Tensor:
        return self.norm(functional.conv2d(torch.where(x > 0, x, 0), self.weights.pop(0), None, stride, padding))

    def norm(self, x: Tensor) -> Tensor:
        scale, shift = self.weights.pop(0)[:, None, None], self.weights.pop(0)[:, None, None]
        mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), correction=0, keepdim=True)
        return (x - mean) / (variance + 1e-5).sqrt() * scale + shift


def windows(x: Tensor, side: int, stride: int, outside: float) -> Tensor:
    """(n, c, h, w) -> (n, c, h / stride, w / stride, side * side)."""
    margin = side // 2 if side % 2 else 0
    padded = functional.pad(x, [margin] * 4, value=outside)
    return padded.unfold(2, side, stride).unfold(3, side, stride).flatten(4)


def largest(x: Tensor, side: int, stride: int) -> Tensor:
    return windows(x, side, stride, -torch.inf).amax(-1)


def average(x: Tensor) -> Tensor:
    return windows(x, 3, 1, 0.0).sum(-1) / windows(torch.ones_like(x), 3, 1, 0.0).sum(-1)


def small(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """L = 3, D = 8 at 64 pixels, with batch norms that scale and shift."""
    layers = build(Config(channels=8)).layers().to(dtype)
    for module in layers.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
    return layers


def test_output_and_gradients_equal_those_written_by_hand() -> None:
    torch.manual_seed(0)
    model, layers = build(Config(channels=8)), small(torch.float64)
    batch, weights = model.sample(3), list(layers.parameters())
    inputs = batch.inputs.double()
    output, expected = layers(inputs), ByHand(weights)(inputs)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-10)
    got = torch.autograd.grad(model.loss(output, batch.targets), weights)
    wanted = torch.autograd.grad(model.loss(expected, batch.targets), weights)
    for (name, _), mine, theirs in zip(layers.named_parameters(), got, wanted, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-9), name
    assert all(gradient.abs().max() > 0 for gradient in got[-2:])


def test_pools_on_a_small_image() -> None:
    """Below zero, so that padding with zeros would be the largest, and would change a mean."""
    image = torch.tensor([[-1.0, -2.0, -3.0, -4.0],
                          [-5.0, -6.0, -7.0, -8.0],
                          [-9.0, -1.0, -2.0, -3.0],
                          [-4.0, -5.0, -6.0, -7.0]])[None, None]  # fmt: skip
    assert max_3x3(1, 1)(image)[0, 0].tolist() == [[-1, -1, -2, -3],
                                                   [-1, -1, -1, -2],
                                                   [-1, -1, -1, -2],
                                                   [-1, -1, -1, -2]]  # fmt: skip
    assert max_3x3(1, 2)(image)[0, 0].tolist() == [[-1, -2], [-1, -1]]
    assert max_2x2(1, 2)(image)[0, 0].tolist() == [[-1, -3], [-1, -2]]
    assert average_3x3(1, 2)(image)[0, 0].tolist() == [[-14 / 4, -30 / 6], [-30 / 6, -45 / 9]]


def test_a_factorized_reduction_sees_two_pixels_of_four() -> None:
    layer = FactorizedReduction(1, 2).eval()
    nn.init.ones_(layer.first.weight)
    nn.init.ones_(layer.second.weight)
    image = torch.arange(16.0).reshape(1, 1, 4, 4)
    got = layer(image)[0] * (1 + layer.norm.eps) ** 0.5
    torch.testing.assert_close(got, torch.tensor([[[0.0, 2.0], [8.0, 10.0]], [[5.0, 7.0], [13.0, 15.0]]]))


def test_a_cell_hands_on_what_it_got() -> None:
    value: Any = torch.randn(2, 3, 64, 64)
    for name, layer in small().named_children():
        if name == "classify":
            break
        arrived, value = value, layer(value)
        if name != "stem1":
            assert value[1] is (arrived if isinstance(arrived, Tensor) else arrived[0]), name


def test_each_layer_can_be_cut_off_and_run_twice() -> None:
    """No layer changes what arrives, which may be a leaf of the graph that other layers have, too."""
    value: Tensor | tuple[Tensor, ...] = torch.randn(2, 3, 64, 64)
    for name, layer in small().named_children():
        arrived = [one.clone() for one in ([value] if isinstance(value, Tensor) else value)]
        leaves = [one.clone().requires_grad_() for one in arrived]
        first, again = (layer(leaves[0] if isinstance(value, Tensor) else tuple(leaves)) for _ in range(2))
        torch.testing.assert_close(first, again, rtol=0, atol=0)
        assert all(torch.equal(leaf, one) for leaf, one in zip(leaves, arrived, strict=True)), name
        value = first.detach() if isinstance(first, Tensor) else tuple(one.detach() for one in first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_single_sample_trains(dtype: torch.dtype) -> None:
    model = build(Config(channels=8))
    batch, layers = model.sample(1), small(dtype)
    output = layers(batch.inputs.to(dtype))
    assert output.dtype == dtype and output.shape == (1, 10)
    model.loss(output, batch.targets).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layers.parameters())


def test_training_lowers_the_loss() -> None:
    torch.manual_seed(0)
    model = build(Config(channels=16))
    layers, batch = model.layers(), model.sample(8)
    optimizer, losses = torch.optim.SGD(layers.parameters(), lr=0.05 / 8), []
    for _ in range(10):
        optimizer.zero_grad()
        loss = model.loss(layers(batch.inputs), batch.targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item() / 8)
    assert losses[-1] < 0.5 * losses[0], losses
