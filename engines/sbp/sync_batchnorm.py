"""Batch norm over samples of which each device has an equal share: one collective forward, one backward.

forward     mean, variance of the own samples --all_gather--> those of all samples (Chan, Golub, LeVeque 1979)
backward    sums over the own samples of dy and dy * normalized --all_gather--> those over all samples

    dx = weight / deviation * (dy - mean(dy) - normalized * mean(dy * normalized))

Both gather and then add up: it is so little that only the wait counts, and gloo's all_reduce has several rounds. The
backward pass reads its input twice: for the sums, and for `dx`, whose last two terms are a batch norm themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from engines.sbp.block_collectives import BlockCollectives
from engines.sbp.block_layout import Digits
from harness.nn.batchnorm import own_statistics


def normed(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, digits: Digits, by: BlockCollectives
) -> tuple[Tensor, Tensor, Tensor]:
    """(samples, channels, ...) -> the same normalized, and mean and biased variance (channels) over all devices."""
    with torch.no_grad():
        means, variances = by.gathered(torch.stack(own_statistics(x)), digits).unbind(1)
        variance, mean = torch.var_mean(means, 0, correction=0)
        variance.add_(variances.mean(0))
    y: Tensor = _Normed.apply(x, weight, bias, mean, variance, eps, digits, by)
    return y, mean, variance


class _Normed(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        eps: float,
        digits: Digits,
        by: BlockCollectives,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.eps, ctx.digits, ctx.by = eps, digits, by
        return _affine(x, mean, variance, weight, bias, eps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of weight and bias are those of the own samples."""
        x, weight, mean, variance = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        inverse = torch.rsqrt(variance + ctx.eps)
        _, by_scale, by_shift = torch.ops.aten.native_batch_norm_backward(  # some of CUDA's kernels read all four
            dy, x, weight, mean, variance, mean, inverse, False, ctx.eps, [False, True, True]
        )
        dx = None
        if wanted[0]:
            samples = x.numel() // x.shape[1] * ctx.by.mesh.size(ctx.digits)
            scale = inverse if weight is None else inverse * weight
            sums = ctx.by.gathered(torch.stack([by_scale, by_shift]), ctx.digits).sum(0)
            slope, shift = sums.mul_(scale / -samples).unbind()
            dx = _affine(x, mean, variance, slope, shift, ctx.eps)
            dx.addcmul_(dy, scale.view([1, -1] + [1] * (x.dim() - 2)))
        return dx, by_scale if wanted[1] else None, by_shift if wanted[2] else None, None, None, None, None, None


def _affine(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """normalized * weight + bias, channel by channel, in one pass over x."""
    return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, eps, torch.backends.cudnn.enabled)
