"""Layers on blocks: each takes the place of a whole one, under the same name, with its shard of the parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from engines.sbp.batchnorm_passes import Affine, Running
from engines.sbp.block_collectives import BlockCollectives, column_of
from engines.sbp.block_layout import Digits, Dim, Layout
from engines.sbp.instruction import Instruction
from engines.sbp.summa import LookedUp, MeshLines, Multiplied
from engines.sbp.sync_batchnorm import normed
from harness.nn import dropout


class Entry:
    """What a matmul computes from: its input, moved and gathered. Matmuls that read the same tensor share one of these,
    and the first of them to run does so for all: sent once, with the sum of their gradients."""

    def __init__(self, instruction: Instruction, by: BlockCollectives) -> None:
        self.instruction, self.by = instruction, by
        self.readers = len(instruction.item.parts) or 1
        self.left, self.given, self.ready = 0, torch.empty(0), torch.empty(0)

    def __call__(self, x: Tensor) -> Tensor:
        if not self.left or x is not self.given:
            self.left, self.given, self.ready = self.readers, x, self._gathered(x)
        self.left -= 1
        ready = self.ready
        if not self.left:
            self.given = self.ready = torch.empty(0)
        return ready

    def _gathered(self, x: Tensor) -> Tensor:
        if x.is_floating_point() and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return self.by(self.by(x, self.instruction.before), self.instruction.gather)


class Product(nn.Module):
    """A matmul with its exchanges: linear, convolution, look-up, or a head that has a weight alone."""

    def __init__(
        self,
        source: nn.Module,
        instruction: Instruction,
        entry: Entry,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        first: int,
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.instruction, self.entry, self.by, self.first = instruction, entry, entry.by, first
        self.bias_after = bias is not None and instruction.scatter is not None  # not once in each partial sum
        self.bias_after |= bias is not None and instruction.panels > 0
        self.compute = self._of(source)

    def _of(self, source: nn.Module) -> Callable[[Tensor], Tensor]:
        if self.instruction.panels:
            lines = MeshLines(self.instruction, self.by)
            if isinstance(source, nn.Embedding):
                return lambda tokens: LookedUp.apply(tokens, self.weight, lines, self.first)
            return lambda x: Multiplied.apply(x, self.weight, lines)
        if isinstance(source, nn.Embedding):
            return self._looked_up if self.instruction.inputs.split else lambda x: functional.embedding(x, self.weight)
        if isinstance(source, nn.Conv2d):
            return lambda x: source._conv_forward(x, self.weight, None if self.bias_after else self.bias)
        return lambda x: functional.linear(x, self.weight, None if self.bias_after else self.bias)

    def _looked_up(self, tokens: Tensor) -> Tensor:
        """Zeros for words that other devices have."""
        local = tokens - self.first
        outside = (local < 0) | (local >= len(self.weight))
        found = functional.embedding(local.masked_fill(outside, 0), self.weight)
        return found.masked_fill(outside.unsqueeze(-1), 0)

    def forward(self, x: Tensor) -> Tensor:
        instruction, by = self.instruction, self.by
        y = by(self.compute(self.entry(x)), instruction.scatter)
        if self.bias is not None and self.bias_after:
            y = y + (self.bias if y.dim() != 4 else self.bias[:, None, None]).to(y.dtype)
        y = by(y, instruction.after)
        return self._by_parts(y) if instruction.heads else y

    def _by_parts(self, y: Tensor) -> Tensor:
        """Columns of head by head (query, key, value) as those of queries, then keys, then values of all heads."""
        width = self.instruction.item.outputs // self.instruction.heads  # of a head's query, key and value together
        parts = 3
        return y.unflatten(-1, (-1, parts, width // parts)).transpose(-3, -2).flatten(-3)


class MovedSum(nn.Module):
    """A residual sum: the first term is moved to the layout of the second one, and the sum to the next layer's."""

    def __init__(self, instruction: Instruction, by: BlockCollectives) -> None:
        super().__init__()
        self.instruction, self.by = instruction, by

    def forward(self, past: Tensor, branch: Tensor) -> Tensor:
        return self.by(self.by(past, self.instruction.past) + branch, self.instruction.on)


class LayerNorm(nn.Module):
    """Over all features, of which this device has some."""

    def __init__(self, source: nn.LayerNorm, digits: Digits, by: BlockCollectives) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = source.weight, source.bias, source.eps
        self.digits, self.by = digits, by

    def forward(self, x: Tensor) -> Tensor:
        x = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        features = x.shape[-1] * self.by.mesh.size(self.digits)
        centred = x - self.by.sum(x.sum(-1, keepdim=True), self.digits) / features
        variance = self.by.sum(centred.square().sum(-1, keepdim=True), self.digits) / features
        y = centred * torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            y = y * self.weight
        return y if self.bias is None else y + self.bias


class RMSNorm(nn.Module):
    """Over all features, of which this device has some."""

    def __init__(self, source: nn.RMSNorm, digits: Digits, by: BlockCollectives) -> None:
        super().__init__()
        self.weight, self.eps, self.digits, self.by = source.weight, source.eps, digits, by

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        features = x.shape[-1] * self.by.mesh.size(self.digits)
        squares = self.by.sum(wide.square().sum(-1, keepdim=True), self.digits) / features
        y = wide * torch.rsqrt(squares + (torch.finfo(wide.dtype).eps if self.eps is None else self.eps))
        return (y if self.weight is None else y * self.weight).to(x.dtype)


class BatchNorm(nn.Module):
    """Over all samples of a micro-batch, of which this device has some."""

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(self, source: _BatchNorm, digits: Digits, by: BlockCollectives) -> None:
        super().__init__()
        self.weight, self.bias = source.weight, source.bias
        self.eps, self.momentum, self.digits, self.by = source.eps, source.momentum, digits, by
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(source, name))

    def forward(self, x: Tensor) -> Tensor:
        own = Affine(self.weight, self.bias, self.eps)
        return normed(x, own, self._running(), self.digits, self.by)

    def _running(self) -> Running | None:
        """Return the running statistics, one micro-batch further."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return None
        self.num_batches_tracked.add_(1)
        share = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        return Running(self.running_mean, self.running_var, share)


class BlockDropout(nn.Module):
    """The whole tensor's mask, of which this device's block is taken; `column` of the tensor is split, if any."""

    def __init__(self, source: nn.Module, layout: Layout, by: BlockCollectives, column: int | None) -> None:
        super().__init__()
        self.source, self.layout, self.by, self.column = source, layout, by, column

    def forward(self, x: Tensor) -> Tensor:
        source = self.source
        if not self.training or not source.p:
            return x
        column = column_of(x) if self.column is None else self.column
        shape = list(x.shape)
        dims = {0: self.layout.rows, column: self.layout.columns}
        for n, dim in dims.items():
            shape[n] *= self.by.mesh.size(dim.split)
        drawn = shape[:2] + [1] * (x.dim() - 2) if dropout.by_channel(source) else shape
        mask = dropout.mask_of(source, tuple(drawn), x)
        for n, dim in dims.items():
            if dim.split and drawn[n] > 1:
                mask = mask.index_select(n, mine(dim, shape[n], self.by, x.device))
        return x.mul_(mask) if getattr(source, "inplace", False) else x * mask


def mine(dim: Dim, size: int, by: BlockCollectives, device: Any) -> Tensor:
    """The indices that this rank has; the same in every micro-batch, so they are made once."""
    key = dim, size, device
    if key not in by.known:
        by.known[key] = torch.from_numpy(dim.mine(size, by.mesh, by.groups.rank)).to(device)
    return by.known[key]
