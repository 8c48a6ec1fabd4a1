"""Batch norm over samples of which each device has an equal share: one collective forward, one backward.

forward     mean, variance of the own samples --all_gather--> those of all samples (Chan, Golub, LeVeque 1979)
backward    sums over the own samples of dy and dy * normalized --all_gather--> those over all samples

    dx = weight / deviation * (dy - mean(dy) - normalized * mean(dy * normalized))

Both gather and then add up: it is so little that only the wait counts, and gloo's all_reduce has several rounds. Each
pass reads its input twice, before and after a gathering (`batchnorm_passes`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from engines.sbp.batchnorm_passes import Affine, Running, passes
from engines.sbp.block_collectives import BlockCollectives
from engines.sbp.block_layout import Digits


def normed(x: Tensor, own: Affine, running: Running | None, digits: Digits, by: BlockCollectives) -> Tensor:
    """(samples, channels, ...) -> the same normalized. Running statistics get their share of those of all devices."""
    y: Tensor = _Normed.apply(x, own.weight, own.bias, own, running, digits, by)
    return y


class _Normed(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        own: Affine,
        running: Running | None,
        digits: Digits,
        by: BlockCollectives,
    ) -> Tensor:
        ctx.passes = passes(x, own, running)
        parts = by.gathered(ctx.passes.own_statistics(x), digits)
        y, statistics = ctx.passes.normalize(x, parts, own, running)
        ctx.save_for_backward(x, weight, statistics)
        ctx.eps, ctx.digits, ctx.by = own.eps, digits, by
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of weight and bias are those of the own samples."""
        x, weight, statistics = ctx.saved_tensors
        wanted, own = ctx.needs_input_grad, Affine(weight, None, ctx.eps)
        sums, dx = ctx.passes.own_sums(dy, x, own, statistics), None
        if wanted[0]:
            parts = ctx.by.gathered(sums, ctx.digits)
            dx = ctx.passes.differentiate(dy, x, parts, own, statistics)
        by_scale, by_shift = sums.unbind()
        return dx, by_scale if wanted[1] else None, by_shift if wanted[2] else None, None, None, None, None
