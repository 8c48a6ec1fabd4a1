"""SUMMA on blocks of a mesh: panels of input and weight go along the lines of the mesh (`harness.sbp.summa`).

    multiplied   y += panel of x * panel of the weight                     both broadcast
    summed       panel of dx = sum over a row of dy * panel of the weight  the weight broadcast, dx reduced
    of_weight    panel of dw = sum over a column of dy^T * panel of x      x broadcast, dw reduced

A look-up is `summed` with one-hot rows for dy, and its gradient `of_weight`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from engines.sbp.block_collectives import BlockCollectives
from engines.sbp.block_layout import Digits
from engines.sbp.instruction import Instruction

Local = Callable[[Tensor], Tensor]
"""A product of this device with one panel."""


class Line:
    """This device's row, or column, of the mesh: the devices that differ in `digits`. Each of them has its part of a
    dimension, in the order of the digits, and of `panels` as many as the others."""

    def __init__(self, digits: Digits, panels: int, by: BlockCollectives) -> None:
        self.by, self.digits = by, tuple(sorted(digits))
        self.members = by.mesh.group(by.groups.rank, digits)
        self.each = panels // len(self.members)

    def broadcast(self, block: Tensor, dim: int, k: int, phase: str) -> Tensor:
        """Panel k of what all members have together, split in dimension `dim`."""
        panel, owner = self._panel(block, dim, k).contiguous(), self.members[k // self.each]
        if owner != self.by.groups.rank:
            panel = torch.empty_like(panel)
        self.by.broadcast(panel, owner, self.digits, phase)
        return panel

    def reduce(self, partial: Tensor, block: Tensor, dim: int, k: int, phase: str) -> None:
        """Sums what members computed of panel k into the `block` of its owner."""
        partial, owner = partial.contiguous(), self.members[k // self.each]
        self.by.reduce(partial, owner, self.digits, phase)
        if owner == self.by.groups.rank:
            self._panel(block, dim, k).copy_(partial)

    def _panel(self, block: Tensor, dim: int, k: int) -> Tensor:
        size = block.shape[dim] // self.each
        return block.narrow(dim, k % self.each * size, size)


class MeshLines:
    """The lines of this device, for a matmul on blocks: of the input (..., inputs / columns), of the weight
    (outputs / columns, inputs / rows), of the output (..., outputs / columns)."""

    def __init__(self, instruction: Instruction, by: BlockCollectives) -> None:
        self.panels, blocks = instruction.panels, instruction.leaves
        self.row, self.column = (Line(dim.cut, self.panels, by) for dim in (blocks.columns, blocks.rows))

    def multiplied(self, x: Tensor, weight: Tensor, phase: str) -> Tensor:
        """x times the transposed weight, in the type of x."""
        y = x.new_zeros(*x.shape[:-1], len(weight))
        for k in range(self.panels):
            part = self.row.broadcast(x, -1, k, phase)
            by_outputs = self.column.broadcast(weight, 1, k, phase).to(x.dtype)
            y.view(-1, len(weight)).addmm_(part.flatten(0, -2), by_outputs.t())
        return y

    def summed(self, local: Local, weight: Tensor, result: Tensor, phase: str) -> Tensor:
        """`result` (..., inputs / columns) filled panel by panel with sums over the row of `local(weight's panel)`."""
        for k in range(self.panels):
            partial = local(self.column.broadcast(weight, 1, k, phase)).to(result.dtype)
            self.row.reduce(partial, result, -1, k, phase)
        return result

    def of_weight(self, local: Local, x: Tensor, weight: Tensor, phase: str) -> Tensor:
        """The weight's gradient: sums over the column of `local(x's panel)`, in the weight's type."""
        gradient = torch.empty_like(weight)
        for k in range(self.panels):
            partial = local(self.row.broadcast(x, -1, k, phase)).to(weight.dtype)
            self.column.reduce(partial, gradient, 1, k, phase)
        return gradient


class Multiplied(Function):
    """A linear layer without its bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, lines: MeshLines) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.lines = lines
        return lines.multiplied(x, weight, "forward")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x, weight), lines = ctx.saved_tensors, ctx.lines
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = lines.summed(lambda panel: gradient @ panel.to(x.dtype), weight, torch.empty_like(x), "backward")
        if ctx.needs_input_grad[1]:
            flat = gradient.flatten(0, -2).t()
            dw = lines.of_weight(lambda panel: flat @ panel.flatten(0, -2), x, weight, "backward")
        return dx, dw, None


class LookedUp(Function):
    """Rows of a weight (words / columns, features / rows), of which this device has the words from `first` on."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, lines: MeshLines, first: int) -> Tensor:
        words = tokens - first
        outside = (words < 0) | (words >= len(weight))
        words = words.masked_fill(outside, 0)
        ctx.save_for_backward(words, outside, weight)
        ctx.lines = lines

        def found(panel: Tensor) -> Tensor:
            return functional.embedding(words, panel).masked_fill(outside.unsqueeze(-1), 0)

        members = len(lines.row.members)
        result = weight.new_empty(*tokens.shape, weight.shape[1] * len(lines.column.members) // members)
        return lines.summed(found, weight, result, "forward")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None, None]:
        words, outside, weight = ctx.saved_tensors

        def added(panel: Tensor) -> Tensor:
            rows = panel.masked_fill(outside.unsqueeze(-1), 0).flatten(0, -2)
            return rows.new_zeros(len(weight), rows.shape[-1]).index_add_(0, words.flatten(), rows)

        return None, ctx.lines.of_weight(added, gradient, weight, "backward"), None, None
