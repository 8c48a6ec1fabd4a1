"""Batch norm over samples of which each device has an equal share: one collective forward, one backward.

forward     mean, variance of the own samples --all_gather--> those of all samples (Chan, Golub, LeVeque 1979)
backward    sums over the own samples of dy and dy * normalized --all_gather--> those over all samples

    dx = weight / deviation * (dy - mean(dy) - normalized * mean(dy * normalized))

Both gather and then add up: it is so little that only the wait counts, and gloo's all_reduce has several rounds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from engines.sbp.block_collectives import BlockCollectives
from engines.sbp.block_layout import Digits
from harness.nn.batchnorm import own_statistics


class Normed(Function):
    """(samples, channels, ...) -> the same normalized, and mean and biased variance (channels) over all devices."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        digits: Digits,
        by: BlockCollectives,
    ) -> tuple[Tensor, Tensor, Tensor]:
        means, variances = by.gathered(torch.stack(own_statistics(x)), digits).unbind(1)
        mean, variance = means.mean(0), variances.mean(0) + means.var(0, correction=0)
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.eps, ctx.digits, ctx.by = eps, digits, by
        ctx.mark_non_differentiable(mean, variance)
        y = functional.batch_norm(x, mean, variance, weight, bias, training=False, eps=eps)
        return y, mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        """The gradients of weight and bias are those of the own samples."""
        x, weight, mean, variance = ctx.saved_tensors
        (dy, *_), wanted = gradients, ctx.needs_input_grad[:3]
        inverse = torch.rsqrt(variance + ctx.eps)
        _, by_scale, by_shift = torch.ops.aten.native_batch_norm_backward(  # some of CUDA's kernels read all four
            dy, x, weight, mean, variance, mean, inverse, False, ctx.eps, [False, True, True]
        )
        dx = None
        if wanted[0]:
            samples = x.numel() // x.shape[1] * ctx.by.mesh.size(ctx.digits)
            shift, slope = ctx.by.gathered(torch.stack([by_shift, by_scale]), ctx.digits).sum(0) / samples
            scale = inverse if weight is None else inverse * weight
            less = -scale * torch.stack([slope, shift])  # normalized * less[0] + less[1], in one pass over x
            dx = functional.batch_norm(x, mean, variance, *less.unbind(), training=False, eps=ctx.eps)
            dx.addcmul_(dy, scale.view([1, -1] + [1] * (x.dim() - 2)))
        return dx, by_scale if wanted[1] else None, by_shift if wanted[2] else None, None, None, None
