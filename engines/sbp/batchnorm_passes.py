"""The passes of a batch norm over split samples, by torch's kernels or by compiled ones where these are faster.

What is gathered is the same, so that devices may differ in who computes it.
"""

from __future__ import annotations

from functools import cache
from pickle import UnpicklingError
from types import ModuleType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from harness.nn.batchnorm import own_statistics


class Running(NamedTuple):
    """Running statistics, (channels) each, and the share of new ones that goes into them."""

    mean: Tensor
    variance: Tensor
    share: float


class Affine(NamedTuple):
    """Weight and bias, (channels) each, if there are some, and what is added to a variance."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float


class Passes(Protocol):
    """`x` and `dy` are (own samples, channels, ...); `parts` (devices, 2, channels) are what all devices have found;
    `statistics` (3, channels) have mean, biased variance and 1 / sqrt(variance + eps) of all samples."""

    def own_statistics(self, x: Tensor) -> Tensor:
        """Return mean and biased variance of the own samples, (2, channels)."""

    def normalize(self, x: Tensor, parts: Tensor, by: Affine, running: Running | None) -> tuple[Tensor, Tensor]:
        """Return normalized * weight + bias, and the statistics, of which the running ones get their share."""

    def own_sums(self, dy: Tensor, x: Tensor, by: Affine, statistics: Tensor) -> Tensor:
        """Return the sums of dy * normalized and of dy over the own samples, (2, channels)."""

    def differentiate(self, dy: Tensor, x: Tensor, parts: Tensor, by: Affine, statistics: Tensor) -> Tensor:
        """Return the gradient of x."""


def passes(x: Tensor, by: Affine, running: Running | None) -> Passes:
    """Return compiled passes for tensors in a CPU's memory, of one dtype and in the order of their dimensions, else
    torch's."""
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
        return BY_TORCH
    for one in (x, by.weight, by.bias, *(running or ())[:2]):
        if one is not None and (one.dtype != x.dtype or not one.is_contiguous()):
            return BY_TORCH
    kernels = compiled()
    return BY_TORCH if kernels is None else _Compiled(kernels, x)


@cache
def compiled() -> ModuleType | None:
    """Return the compiled kernels, which takes some seconds where no run has made them yet; None where numba does not
    work, or cannot keep and read what it makes."""
    try:
        from engines.sbp import compiled_batchnorm
    except (ImportError, AttributeError, RuntimeError, OSError, EOFError, UnpicklingError):
        return None
    return compiled_batchnorm


class _Torch:
    def own_statistics(self, x: Tensor) -> Tensor:
        return torch.stack(own_statistics(x))

    def normalize(self, x: Tensor, parts: Tensor, by: Affine, running: Running | None) -> tuple[Tensor, Tensor]:
        means, variances = parts.unbind(1)
        variance, mean = torch.var_mean(means, 0, correction=0)
        variance.add_(variances.mean(0))
        if running is not None:
            count = x.numel() // x.shape[1] * len(parts)
            running.mean.lerp_(mean, running.share)
            running.variance.lerp_(variance * (count / max(1, count - 1)), running.share)
        y = _affine(x, mean, variance, by.weight, by.bias, by.eps)
        return y, torch.stack([mean, variance, torch.rsqrt(variance + by.eps)])

    def own_sums(self, dy: Tensor, x: Tensor, by: Affine, statistics: Tensor) -> Tensor:
        mean, variance, inverse = statistics.unbind()
        _, by_scale, by_shift = torch.ops.aten.native_batch_norm_backward(  # some of CUDA's kernels read all four
            dy, x, by.weight, mean, variance, mean, inverse, False, by.eps, [False, True, True]
        )
        return torch.stack([by_scale, by_shift])

    def differentiate(self, dy: Tensor, x: Tensor, parts: Tensor, by: Affine, statistics: Tensor) -> Tensor:
        """The last two terms are a batch norm themselves."""
        mean, variance, inverse = statistics.unbind()
        scale = inverse if by.weight is None else inverse * by.weight
        count = x.numel() // x.shape[1] * len(parts)
        slope, shift = parts.sum(0).mul_(scale / -count).unbind()
        dx = _affine(x, mean, variance, slope, shift, by.eps)
        return dx.addcmul_(dy, scale.view([1, -1] + [1] * (x.dim() - 2)))


BY_TORCH = _Torch()


def _affine(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """normalized * weight + bias, channel by channel, in one pass over x."""
    return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, eps, torch.backends.cudnn.enabled)


class _Compiled:
    """For tensors of the shape and dtype of `x`."""

    def __init__(self, kernels: ModuleType, x: Tensor) -> None:
        samples, channels = x.shape[:2]
        self.kernels, self.dtype = kernels, str(x.dtype)
        self.sizes = samples, channels, x.numel() // max(1, samples * channels)

    def own_statistics(self, x: Tensor) -> Tensor:
        found = x.new_empty(2, self.sizes[1])
        self.kernels.own_statistics[self.dtype](x.data_ptr(), found.data_ptr(), *self.sizes)
        return found

    def normalize(self, x: Tensor, parts: Tensor, by: Affine, running: Running | None) -> tuple[Tensor, Tensor]:
        y, statistics = torch.empty_like(x), x.new_empty(3, self.sizes[1])
        weight = x.new_ones(self.sizes[1]) if by.weight is None else by.weight
        bias = x.new_zeros(self.sizes[1]) if by.bias is None else by.bias
        mean, variance, share = (statistics, statistics, 0.0) if running is None else running
        tensors = x, parts, weight, bias, y, statistics, mean, variance
        addresses = [one.data_ptr() for one in tensors]
        self.kernels.normalize[self.dtype](*addresses, by.eps, share, len(parts), parts.stride(0), *self.sizes)
        return y, statistics

    def own_sums(self, dy: Tensor, x: Tensor, by: Affine, statistics: Tensor) -> Tensor:
        found, dy = x.new_empty(2, self.sizes[1]), dy.contiguous()
        addresses = [one.data_ptr() for one in (dy, x, statistics, found)]
        self.kernels.own_sums[self.dtype](*addresses, *self.sizes)
        return found

    def differentiate(self, dy: Tensor, x: Tensor, parts: Tensor, by: Affine, statistics: Tensor) -> Tensor:
        dx, dy = torch.empty_like(x), dy.contiguous()
        weight = x.new_ones(self.sizes[1]) if by.weight is None else by.weight
        addresses = [one.data_ptr() for one in (dy, x, parts, weight, statistics, dx)]
        self.kernels.differentiate[self.dtype](*addresses, len(parts), parts.stride(0), *self.sizes)
        return dx
