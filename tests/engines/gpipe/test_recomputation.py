"""Layers that a recomputation must not disturb: the gradients and the state are those of the layers alone."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm

from engines.gpipe.gpipe_module import GPipe
from tests.engines.gpipe.test_cuda_pipeline import run_tensors

WIDTH = 3
MODES = ["never", "except_last", "always"]


class Skip(nn.Module):
    """Returns its input for some micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if x[0, 0] > 0 else x  # type: ignore[no-any-return]


class AddOne(nn.Module):
    """Works in place, without an attribute that says so."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


class SkipAddOne(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(Skip(), AddOne())


class CountSome(nn.Module):
    """Counts micro-batches, not the first ones."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 2:
            self.count += 1
        return x * 1.5


class CountLate(nn.Module):
    """The same, by the data."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] > 0:
            self.count += 1
        return x * 1.5


class Momentum(nn.Module):
    """The output depends on a buffer that the layer replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return x * self.mean


class MomentumInPlace(nn.Module):
    """The output depends on a buffer that the layer changes in place, from some micro-batch on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.mean.clone()
        if x[0, 0] > 0:
            self.mean.mul_(0.5).add_(x.detach().mean(0))
        return y


class OwnStatistics(nn.Module):
    """A native kernel changes the buffers, and their versions stay."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        shift = self.mean.clone()
        return functional.batch_norm(x, self.mean, self.variance, training=self.training) + shift * x


class GrowingCache(nn.Module):
    """Makes a buffer when it first needs it, and remembers in a number that it is there."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > self.size:
            self.size = x.shape[0]
            self.register_buffer("cache", torch.arange(1.0, self.size + 1, dtype=x.dtype), persistent=False)
        return x * self.cache[: x.shape[0], None]


class LateCache(GrowingCache):
    """Needs one for large micro-batches only."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.shape[0] > 2 else x.tanh()


class PlainTensor(nn.Module):
    """Keeps its state in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.ones((), dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.last.clone()
        self.last += 1
        return y


class Alternates(nn.Module):
    """Computes something else every other time, and holds no tensor."""

    odd = False

    def forward(self, x: Tensor) -> Tensor:
        self.odd = not self.odd
        return x.tanh() if self.odd else 2 * x


def normed_linear() -> nn.Module:
    return spectral_norm(nn.Linear(WIDTH, WIDTH))


def tracking_instance_norm() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, WIDTH)), nn.InstanceNorm1d(1, track_running_stats=True), nn.Flatten())


def old_normed_linear() -> nn.Module:
    return torch.nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))


LAYERS: list[Callable[[], nn.Module]] = [
    SkipAddOne, CountSome, CountLate, Momentum, MomentumInPlace, OwnStatistics, GrowingCache, LateCache, PlainTensor,
    Alternates,
    normed_linear, old_normed_linear, tracking_instance_norm, lambda: nn.BatchNorm1d(WIDTH),
    lambda: nn.Linear(WIDTH, WIDTH), Skip, AddOne,
]  # fmt: skip


def on_lanes(pipe: GPipe, x: Tensor) -> Tensor:
    output: Tensor = pipe(x)
    return output


def on_tensors(pipe: GPipe, x: Tensor) -> Tensor:
    output = run_tensors(pipe, x, pipe.chunks, pipe.checkpoint)[1]
    assert isinstance(output, Tensor)
    return output


DRIVERS = {"lanes": on_lanes, "tensors": on_tensors}


def check(layers: nn.Sequential, balance: list[int], chunks: int, mode: str, driver: str, steps: int = 2) -> None:
    """Gradients and buffers after some steps, against the layers alone, micro-batch after micro-batch."""
    plain = layers.double()
    pipe = GPipe(copy.deepcopy(plain), balance, ["cpu"] * len(balance), chunks, mode)
    for step in range(steps):
        x = torch.randn(2 * chunks + step, WIDTH, dtype=torch.float64)
        x[: len(x) // 2, 0] = -1.0
        for part in x.clone().tensor_split(chunks):
            (plain(part) ** 2).sum().backward()
        (DRIVERS[driver](pipe, x.clone()) ** 2).sum().backward()
    mine = dict(pipe.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(mine[name].grad, parameter.grad, rtol=1e-9, atol=1e-9, msg=name)
    buffers = dict(pipe.named_buffers())
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(buffers[name], buffer, rtol=1e-9, atol=1e-9, msg=name)
    pipe.close()


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_is_recomputed_as_it_was(layer: Callable[[], nn.Module], mode: str, driver: str) -> None:
    torch.manual_seed(0)
    check(nn.Sequential(nn.Linear(WIDTH, WIDTH), layer(), nn.Linear(WIDTH, WIDTH)), [1, 2], 4, mode, driver)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_layers_are_recomputed_as_they_were(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    chosen = data.draw(st.lists(st.sampled_from(LAYERS), min_size=1, max_size=4))
    layers = [nn.Linear(WIDTH, WIDTH), *(make() for make in chosen), nn.Linear(WIDTH, WIDTH)]
    first = data.draw(st.integers(1, len(layers) - 1))
    chunks, mode, driver = (
        data.draw(st.integers(1, 4)),
        data.draw(st.sampled_from(MODES)),
        data.draw(st.sampled_from([*DRIVERS])),
    )
    check(nn.Sequential(*layers), [first, len(layers) - first], chunks, mode, driver)


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_recomputation_does_not_write_to_the_callers_tensor(driver: str) -> None:
    x = torch.randn(4, WIDTH)
    before = x.clone()
    pipe = GPipe(nn.Sequential(AddOne(), nn.Linear(WIDTH, WIDTH)), [1, 1], ["cpu"] * 2, 2, "always")
    DRIVERS[driver](pipe, x).sum().backward()
    assert torch.equal(x, before)


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_frozen_parameter_that_the_forward_pass_changes_is_refused(driver: str) -> None:
    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.code = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            self.code.mul_(0.5)
            return x * self.code

    pipe = GPipe(nn.Sequential(nn.Linear(WIDTH, WIDTH), Codebook()), [1, 1], ["cpu"] * 2, 2, "always")
    with pytest.raises(RuntimeError, match="'code' of Codebook") as raised:
        DRIVERS[driver](pipe, torch.ones(4, WIDTH))
    assert any("stage 1" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_recomputation_that_does_something_else_is_refused(driver: str) -> None:
    class Switched(nn.Module):
        on = False

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if Switched.on:
                self.count += 1
            return x * 2

    pipe = GPipe(nn.Sequential(nn.Linear(WIDTH, WIDTH), Switched()), [1, 1], ["cpu"] * 2, 2, "always")
    loss = DRIVERS[driver](pipe, torch.ones(4, WIDTH)).sum()
    Switched.on = True
    with pytest.raises(RuntimeError, match="'count' of Switched"):
        loss.backward()
