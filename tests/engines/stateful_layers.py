"""Layers with state that a careless recomputation disturbs: in-place work now and then, buffers, counters, caches."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm

WIDTH = 3


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
        return super().forward(x) if x.shape[0] > 2 else 0.5 * x


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
        return 3 * x if self.odd else 2 * x


class LateLinear(nn.Linear):
    """A layer of torch's with a number of its own that changes now and then."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.factor = 1

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * self.factor
        if x[0, 0] > 0:
            self.factor += 1
        return y


class LateTensor(nn.Module):
    """Has no tensor until some micro-batch leaves one."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.last is None else x * self.last
        if x[0, 0] > 0:
            self.last = 1 + x.detach().mean(0).abs()
        return y


class LateData(MomentumInPlace):
    """Changes a buffer past its version, now and then."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.mean.clone()
        if x[0, 0] > 0:
            self.mean.data.mul_(0.5).add_(x.detach().mean(0))
        return y


class LateStatistics(OwnStatistics):
    """The same, now and then."""

    def forward(self, x: Tensor) -> Tensor:
        shift = self.mean.clone()
        if x[0, 0] > 0:
            functional.batch_norm(x.detach(), self.mean, self.variance, training=True)
        return x + shift


class Members(nn.Module):
    """Keeps its state in a container of the type that it is given."""

    def __init__(self, seen: Any) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        y = x * (1 + 0.5 * len(self.seen))
        if x[0, 0] > 0:
            self.note(x.detach().mean())
        return y

    def note(self, value: Tensor) -> None:
        if isinstance(self.seen, dict):
            self.seen[len(self.seen)] = value
        elif isinstance(self.seen, set):
            self.seen.add(len(self.seen))
        elif isinstance(self.seen, tuple):
            self.seen = (*self.seen, value)
        else:
            self.seen.append(value)


def normed_linear() -> nn.Module:
    return spectral_norm(nn.Linear(WIDTH, WIDTH))


def tracking_instance_norm() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, WIDTH)), nn.InstanceNorm1d(1, track_running_stats=True), nn.Flatten())


def old_normed_linear() -> nn.Module:
    return torch.nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))


class ReadsNorm(nn.Module):
    """The output depends on the running statistics of a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return y + x * self.norm.running_mean.clone()


class HiddenNorm(nn.Module):
    """The batch norm is in a list, where torch does not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = [nn.BatchNorm1d(WIDTH, affine=False).double()]

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x.double()) + x * self.norms[0].running_mean.clone()
        return y.to(x.dtype)  # type: ignore[no-any-return]


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Any) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class Reversal(nn.Module):
    """Gradients, and they alone, are multiplied by what `factor` takes of `state`, another one in each pass."""

    def __init__(self, state: Any, factor: Callable[[Any], Any]) -> None:
        super().__init__()
        self.state, self.factor = state, factor

    def forward(self, x: Tensor) -> Tensor:
        return _Scaled.apply(x, self.factor(self.state))  # type: ignore[no-any-return]


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


def add_one(state: Any) -> float:
    state.calls += 1
    return 0.1 * state.calls  # type: ignore[no-any-return]


def add_one_inside(state: Any) -> float:
    state["a"]["step"] += 1
    return 0.1 * float(state["a"]["step"])


def add_one_to_array(state: Any) -> float:
    state += 1
    return float(state[0])


def add_one_to_tensor(state: Any) -> float:
    state["a"].add_(1)
    return float(state["a"])


def draw(generator: Any) -> Tensor:
    return torch.rand(WIDTH, generator=generator)


def hooked() -> nn.Module:
    """A layer of torch's own whose hook counts in an attribute of the layer."""
    layer = nn.Linear(WIDTH, WIDTH)
    layer.seen = []  # type: ignore[assignment]

    def hook(module: Any, _: Any, output: Tensor) -> Tensor:
        module.seen.append(1)
        return _Scaled.apply(output, 0.1 * len(module.seen))  # type: ignore[no-any-return]

    layer.register_forward_hook(hook)
    return layer


def counted_norm() -> nn.Module:
    class Counted(ReadsNorm):
        def forward(self, x: Tensor) -> Tensor:
            return _Scaled.apply(self.norm(x), self.norm.num_batches_tracked.item())  # type: ignore[no-any-return]

    return Counted()


GRADIENT_ONLY: list[Callable[[], nn.Module]] = [
    lambda: Reversal(SimpleNamespace(calls=0), add_one),
    lambda: Reversal(Slotted(), add_one),
    lambda: Reversal({"a": {"step": 0}}, add_one_inside),
    lambda: Reversal({"a": {"step": np.zeros(())}}, add_one_inside),
    lambda: Reversal(np.zeros(1), add_one_to_array),
    lambda: Reversal({"a": torch.zeros(())}, add_one_to_tensor),
    lambda: Reversal(itertools.count(1), next),
    lambda: Reversal([itertools.count(1)], lambda state: next(state[0])),
    lambda: Reversal(torch.Generator().manual_seed(1), draw),
    lambda: Reversal(random.Random(1), lambda state: state.random()),
    lambda: Reversal(np.random.default_rng(1), lambda state: float(state.random())),
    hooked, counted_norm,
]  # fmt: skip


LAYERS: list[Callable[[], nn.Module]] = [
    SkipAddOne, CountSome, CountLate, Momentum, MomentumInPlace, OwnStatistics, GrowingCache, LateCache, PlainTensor,
    Alternates, LateLinear, LateTensor, LateData, LateStatistics,
    lambda: Members([]), lambda: Members({}), lambda: Members(set()), lambda: Members(()), lambda: Members(deque()),
    normed_linear, old_normed_linear, tracking_instance_norm, lambda: nn.BatchNorm1d(WIDTH),
    lambda: nn.Linear(WIDTH, WIDTH), Skip, AddOne, ReadsNorm, HiddenNorm, *GRADIENT_ONLY,
]  # fmt: skip
