"""Collectives on blocks: what each device holds of a tensor goes from one layout to another, its gradient back.

local block            (rows, ..., columns)
axes of the digits     (d0, d1, rows', ..., columns')      to the front: a part for each member of the group
collective             all_gather, reduce_scatter or all_to_all over the group
and back               each axis into the rows or columns that it is a part of now
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from engines.sbp.layout import Digits, Dim, Layout, Mesh
from engines.sbp.program import Exchange
from harness.collectives import all_gather, all_to_all, reduce_scatter
from harness.simulate.routes import STEPS
from harness.tally import Tally

Name = tuple[int, int]
"""A dimension, and a digit that is an axis of it; what is left of the dimension is REST."""
REST = -1


class Groups:
    """Process groups of a mesh, one for each set of ranks and use; every rank makes all of them at the same point.

    `first` is the first rank of the mesh. Sums of gradients have groups of their own: they run beside the others.
    """

    made: ClassVar[dict[tuple[str, tuple[int, ...]], Any]] = {}
    """Of this process, by their ranks; another session uses them again."""

    def __init__(self, mesh: Mesh, first: int, rank: int) -> None:
        self.mesh, self.first, self.rank = mesh, first, rank
        self._own: dict[tuple[str, Digits], Any] = {}

    def make(self, use: str, wanted: Iterable[Digits], ranks: int) -> None:
        """Of all meshes of a run of `ranks` ranks."""
        for digits in sorted(set(wanted)):
            for start in range(0, ranks, self.mesh.devices):
                for rank in range(self.mesh.devices):
                    members = self._members(start, rank, digits)
                    if (use, members) not in self.made and members[0] == start + rank:
                        self.made[use, members] = dist.new_group(list(members))

    def _members(self, first: int, rank: int, digits: Digits) -> tuple[int, ...]:
        return tuple(first + one for one in self.mesh.group(rank, digits))

    def of(self, use: str, digits: Digits) -> Any:
        """This rank's."""
        if (use, digits) not in self._own:
            self._own[use, digits] = self.made[use, self._members(self.first, self.rank, digits)]
        return self._own[use, digits]


class Exchanger:
    """Runs exchanges in the groups of this rank, counts what it sends."""

    def __init__(self, mesh: Mesh, groups: Groups, tally: Tally, aligned: bool = False) -> None:
        self.mesh, self.groups, self.tally, self.aligned = mesh, groups, tally, aligned
        self.known: dict[tuple[Dim, int, Any], Tensor] = {}  # indices of this rank

    def __call__(self, x: Tensor, exchange: Exchange | None) -> Tensor:
        if exchange is None:
            return x
        result: Tensor = _Exchanged.apply(x, exchange, self)
        return result

    def sum(self, x: Tensor, digits: Digits) -> Tensor:
        """Statistics summed over a group; so are their gradients."""
        result: Tensor = _Summed.apply(x, digits, self) if digits else x
        return result

    def total(self, x: Tensor, digits: Digits) -> Tensor:
        """A sum of which every member makes the same, so that its gradient is everybody's already."""
        result: Tensor = _Totalled.apply(x, digits, self) if digits else x
        return result

    def run(self, x: Tensor, exchange: Exchange, phase: str) -> Tensor:
        if exchange.name == "all_gather":
            return self._gathered(x, exchange, phase)
        names, sizes = self._opened(x, exchange, exchange.before)
        front = [names.index(name) for name in self._axes_of(exchange.after, x, exchange.digits)]
        others = [n for n in range(len(names)) if n not in front]
        parts = x.reshape(sizes).permute(*front, *others).contiguous()
        shape = [sizes[n] for n in others]
        left = [names[n] for n in others]
        group = self.groups.of("activations", exchange.digits)
        with self._counted(exchange.name, phase, parts.nbytes, exchange.digits):
            if exchange.name == "reduce_scatter":
                out = parts.new_empty(shape)
                reduce_scatter(out.view(-1), parts.view(-1), group=group)
            else:
                out = torch.empty_like(parts)
                all_to_all(out.view(-1), parts.view(-1), group=group)
        if exchange.name == "all_to_all":
            left = [*self._axes_of(exchange.before, x, exchange.digits), *left]
        return self._closed(out, x, left, exchange)

    def _gathered(self, x: Tensor, exchange: Exchange, phase: str) -> Tensor:
        names, sizes = self._opened(x, exchange, exchange.before)
        group = self.groups.of("activations", exchange.digits)
        members = [self.mesh.sizes[digit] for digit in exchange.digits]
        out = x.new_empty([*members, *sizes])
        with self._counted("all_gather", phase, out.nbytes, exchange.digits):
            all_gather(out.view(-1), x.contiguous().view(-1), group=group)
        return self._closed(out, x, [*self._axes_of(exchange.before, x, exchange.digits), *names], exchange)

    @staticmethod
    def _axes_of(layout: Layout, x: Tensor, digits: Digits) -> list[Name]:
        """The axes that digits split in a layout."""
        return [(0 if digit in layout.rows.split else column_of(x), digit) for digit in digits]

    def _closed(self, out: Tensor, x: Tensor, names: list[Name], exchange: Exchange) -> Tensor:
        """Every axis where the layout behind the exchange has it."""
        wanted = [name for name in self._names(x.dim(), exchange, exchange.after) if name in names]
        assert len(wanted) == len(names), (wanted, names)
        shape = dict(zip(names, out.shape, strict=True))
        column = column_of(x)
        lengths = []
        for n in range(x.dim()):
            axes, split = self._axes(n, column, exchange, exchange.after)
            lengths.append(prod(shape[n, a] for a in axes if a not in split) * shape[n, REST])
        return out.permute([names.index(name) for name in wanted]).reshape(lengths)

    def _opened(self, x: Tensor, exchange: Exchange, layout: Layout) -> tuple[list[Name], list[int]]:
        """The local block's axes: those of digits that do not split it, and what is left of each dimension."""
        names: list[Name] = []
        sizes: list[int] = []
        column = column_of(x)
        for n, length in enumerate(x.shape):
            axes, split = self._axes(n, column, exchange, layout)
            own = [axis for axis in axes if axis not in split]
            names += [*((n, axis) for axis in own), (n, REST)]
            sizes += [*(self.mesh.sizes[axis] for axis in own), length // prod(self.mesh.sizes[axis] for axis in own)]
        return names, sizes

    def _names(self, dims: int, exchange: Exchange, layout: Layout) -> list[Name]:
        names: list[Name] = []
        for n in range(dims):
            axes, split = self._axes(n, 1 if dims in (2, 4) else dims - 1, exchange, layout)
            names += [*((n, axis) for axis in axes if axis not in split), (n, REST)]
        return names

    def _axes(self, n: int, column: int, exchange: Exchange, layout: Layout) -> tuple[Digits, frozenset[int]]:
        """Of dimension n: the axes that it has on either side of the exchange, and those that split it in a layout."""
        if n not in (0, column):
            return (), frozenset()
        dims: tuple[Dim, Dim] = (
            (exchange.before.rows, exchange.after.rows) if n == 0 else (exchange.before.columns, exchange.after.columns)
        )
        axes = max((dim.axes for dim in dims), key=len)
        return axes, (layout.rows if n == 0 else layout.columns).split

    def _counted(self, name: str, phase: str, size: int, digits: Digits) -> Any:
        members = self.mesh.size(digits)
        if self.aligned:
            dist.barrier(self.groups.of("activations", digits))
        return self.tally.counting(f"{name}@{phase}", STEPS[name] * (members - 1) * size // members)

    def summed(self, x: Tensor, digits: Digits) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        with self._counted("all_reduce", "statistics", total.nbytes, digits):
            dist.all_reduce(total, group=self.groups.of("activations", digits))
        return total

    def largest(self, x: Tensor, digits: Digits) -> Tensor:
        """The maximum over a group, without a gradient."""
        largest = x.detach().clone(memory_format=torch.contiguous_format)
        if digits:
            with self._counted("all_reduce", "statistics", largest.nbytes, digits):
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.groups.of("activations", digits))
        return largest


def column_of(x: Tensor) -> int:
    """The dimension of the features: channels of images, else the last one."""
    return 1 if x.dim() in (2, 4) else x.dim() - 1


class _Exchanged(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, by: Exchanger) -> Tensor:
        ctx.exchange, ctx.by = exchange, by
        return by.run(x, exchange, "forward")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.by.run(gradient, ctx.exchange.reversed, "backward"), None, None


class _Summed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, digits: Digits, by: Exchanger) -> Tensor:
        ctx.digits, ctx.by = digits, by
        return by.summed(x, digits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.by.summed(gradient, ctx.digits), None, None


class _Totalled(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, digits: Digits, by: Exchanger) -> Tensor:
        return by.summed(x, digits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None
