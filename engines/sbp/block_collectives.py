"""Collectives on blocks: convert a device's block of a tensor from one layout to another, and its gradient back.

block --opened, sent--> all_gather, reduce_scatter or all_to_all --received, back, closed--> block

block      (rows, ..., columns)
opened     (d0, d1, rows', ..., columns')    an axis for each digit that does not split it
sent       the axes of leaving digits first: one part for each member of the group
received   the axes of arriving digits first: one part from each member
closed     each axis merged into the rows or columns that it belongs to now
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from engines.sbp.block_layout import Digits, Dim, Layout, Mesh
from engines.sbp.host_memory import LARGEST, HostMemory
from engines.sbp.instruction import Exchange
from harness.runtime.collectives import CollectiveCounter, all_to_all, new_group
from harness.runtime.direct_collectives import all_gather, reduce_scatter
from harness.simulator.routes import STEPS

Name = tuple[int, int]
"""A dimension, and a digit that is an axis of it; what is left of the dimension is REST."""
REST = -1


@dataclass(frozen=True)
class BlockPermutation:
    """Reshape and permutation of a block around a collective.

    The block is viewed with shape `opened` and permuted by `sent` before the collective. Its result of shape `received`
    is permuted by `back` and reshaped to `closed`.
    """

    opened: tuple[int, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]
    back: tuple[int, ...]
    closed: tuple[int, ...]


def block_permutation(shape: Sequence[int], exchange: Exchange, mesh: Mesh) -> BlockPermutation:
    """Return the permutation for a block of this shape."""
    dims = len(shape)
    leaving = () if exchange.name == "all_gather" else exchange.digits
    arriving = () if exchange.name == "reduce_scatter" else exchange.digits
    own = _names(dims, exchange, exchange.before)
    opened = []
    for n, length in enumerate(shape):
        digits = [digit for dim, digit in own if dim == n and digit != REST]
        opened += [*(mesh.sizes[digit] for digit in digits), length // mesh.size(tuple(digits))]
    parts = _places(dims, exchange.after, leaving)
    left = [name for name in own if name not in parts]
    came = [*_places(dims, exchange.before, arriving), *left]
    wanted = _names(dims, exchange, exchange.after)
    assert sorted(wanted) == sorted(came), (wanted, came)
    sizes = dict(zip(own, opened, strict=True)) | {name: mesh.sizes[name[1]] for name in came if name[1] != REST}
    return BlockPermutation(
        opened=tuple(opened),
        sent=tuple(own.index(name) for name in (*parts, *left)),
        received=tuple(sizes[name] for name in came),
        back=tuple(came.index(name) for name in wanted),
        closed=tuple(prod(sizes[name] for name in wanted if name[0] == n) for n in range(dims)),
    )


def column(dims: int) -> int:
    """The dimension of the features: channels of images, else the last one."""
    return 1 if dims in (2, 4) else dims - 1


def _places(dims: int, layout: Layout, digits: Digits) -> list[Name]:
    """The axes that digits split in a layout."""
    return [(0 if digit in layout.rows.split else column(dims), digit) for digit in digits]


def _names(dims: int, exchange: Exchange, layout: Layout) -> list[Name]:
    """Return the axes of a local block: those of digits that do not split it, and the rest of each dimension."""
    names: list[Name] = []
    for n in range(dims):
        axes, split = _axes(n, column(dims), exchange, layout)
        names += [*((n, axis) for axis in axes if axis not in split), (n, REST)]
    return names


def _axes(n: int, column: int, exchange: Exchange, layout: Layout) -> tuple[Digits, frozenset[int]]:
    """Return the axes of dimension n on either side of the exchange, and those of them that split it in a layout."""
    if n not in (0, column):
        return (), frozenset()
    dims: tuple[Dim, Dim] = (
        (exchange.before.rows, exchange.after.rows) if n == 0 else (exchange.before.columns, exchange.after.columns)
    )
    axes = max((dim.axes for dim in dims), key=len)
    return axes, (layout.rows if n == 0 else layout.columns).split


COLLECTIVES: dict[str, Callable[..., Any]] = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
}


class Groups:
    """Process groups of a mesh, one for each set of ranks and use; every rank creates all of them in the same order.

    `first` is the first rank of the mesh. Gradient all-reduces have groups of their own, because they overlap with the
    others. Those of activations have memory that their members share, where these are on one host (`memory`).
    """

    made: ClassVar[dict[tuple[str, tuple[int, ...]], Any]] = {}
    """Process groups of this process, by their ranks; later sessions use them again."""
    memories: ClassVar[dict[tuple[int, ...], HostMemory | None]] = {}
    """What the members of the groups for activations share that this process is one of."""

    def __init__(self, mesh: Mesh, first: int, rank: int) -> None:
        self.mesh, self.first, self.rank = mesh, first, rank
        self._own: dict[tuple[str, Digits], Any] = {}
        self._shared: dict[Digits, HostMemory | None] = {}

    def make(self, use: str, wanted: Iterable[Digits], ranks: int) -> None:
        """Create the groups of all meshes of a run of `ranks` ranks."""
        for digits in sorted(set(wanted)):
            for start in range(0, ranks, self.mesh.devices):
                for rank in range(self.mesh.devices):
                    members = self._members(start, rank, digits)
                    if (use, members) not in self.made and members[0] == start + rank:
                        group = self.made[use, members] = new_group(members)
                        if use == "activations" and dist.get_rank() in members and dist.get_backend(group) == "gloo":
                            self.memories[members] = HostMemory.shared(group)

    def _members(self, first: int, rank: int, digits: Digits) -> tuple[int, ...]:
        return tuple(first + one for one in self.mesh.group(rank, digits))

    def of(self, use: str, digits: Digits) -> Any:
        """Return this rank's process group over the given digits."""
        if (use, digits) not in self._own:
            self._own[use, digits] = self.made[use, self._members(self.first, self.rank, digits)]
        return self._own[use, digits]

    def memory(self, digits: Digits) -> HostMemory | None:
        """Return what the members of this rank's group over the given digits share, if they do."""
        if digits not in self._shared:
            self._shared[digits] = self.memories.get(self._members(self.first, self.rank, digits))
        return self._shared[digits]


class BlockCollectives:
    """Run exchanges in the process groups of this rank and count the bytes that are sent."""

    def __init__(self, mesh: Mesh, groups: Groups, counter: CollectiveCounter, aligned: bool = False) -> None:
        self.mesh, self.groups, self.counter, self.aligned = mesh, groups, counter, aligned
        self.known: dict[tuple[Dim, int, Any], Tensor] = {}  # indices of this rank
        self.permutations: dict[tuple[Exchange, torch.Size], BlockPermutation] = {}

    def __call__(self, x: Tensor, exchange: Exchange | None) -> Tensor:
        if exchange is None:
            return x
        result: Tensor = _Exchanged.apply(x, exchange, self)
        return result

    def sum(self, x: Tensor, digits: Digits) -> Tensor:
        """Sum statistics over a group; gradients are summed, too."""
        result: Tensor = _Summed.apply(x, digits, self) if digits else x
        return result

    def total(self, x: Tensor, digits: Digits) -> Tensor:
        """Sum over a group whose members all compute the same loss from it, so that the gradient needs no sum."""
        result: Tensor = _Totalled.apply(x, digits, self) if digits else x
        return result

    def run(self, x: Tensor, exchange: Exchange, phase: str) -> Tensor:
        key = exchange, x.shape
        if key not in self.permutations:
            self.permutations[key] = block_permutation(x.shape, exchange, self.mesh)
        found = self.permutations[key]
        parts = x.reshape(found.opened).permute(found.sent).contiguous()
        out = parts.new_empty(found.received)
        group = self.groups.of("activations", exchange.digits)
        with self._counted(exchange.name, phase, max(parts.nbytes, out.nbytes), exchange.digits):
            COLLECTIVES[exchange.name](out.view(-1), parts.view(-1), group=group)
        return out.permute(found.back).reshape(found.closed)

    def _counted(self, name: str, phase: str, size: int, digits: Digits) -> Any:
        members = self.mesh.size(digits)
        if self.aligned:
            dist.barrier(self.groups.of("activations", digits))
        return self.counter.counting(f"{name}@{phase}", STEPS.get(name, 1) * (members - 1) * size // members)

    def broadcast(self, x: Tensor, owner: int, digits: Digits, phase: str) -> None:
        """Overwrites x with that of shard `owner`, one of the group."""
        if digits:
            with self._counted("broadcast", phase, x.nbytes, digits):
                dist.broadcast(x, self.groups.first + owner, group=self.groups.of("activations", digits))

    def reduce(self, x: Tensor, owner: int, digits: Digits, phase: str) -> None:
        """Sums x over a group, in the shard `owner`; what others have afterwards is undefined."""
        if digits:
            with self._counted("reduce", phase, x.nbytes, digits):
                dist.reduce(x, self.groups.first + owner, group=self.groups.of("activations", digits))

    def summed(self, x: Tensor, digits: Digits) -> Tensor:
        return self._reduced(x, digits, dist.ReduceOp.SUM)

    def _reduced(self, x: Tensor, digits: Digits, by: Any) -> Tensor:
        """Sums or maxima over a group; where its members share memory, in the order of the group."""
        memory = self._memory(x, digits)
        with self._counted("all_reduce", "statistics", x.nbytes, digits):
            if memory is not None:
                parts = memory.gathered(x)
                return parts.amax(0) if by == dist.ReduceOp.MAX else parts.sum(0)
            found = x.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(found, by, group=self.groups.of("activations", digits))
        return found

    def _memory(self, x: Tensor, digits: Digits) -> HostMemory | None:
        """Return what a group's members share, for a tensor that is small enough."""
        return self.groups.memory(digits) if x.device.type == "cpu" and x.nbytes <= LARGEST else None

    def gathered(self, x: Tensor, digits: Digits) -> Tensor:
        """Gather the statistics of all members of a group: (members, ...), in the order of the group. The result may
        be overwritten by the next call."""
        memory, members = self._memory(x, digits), self.mesh.size(digits)
        with self._counted("all_gather", "statistics", members * x.nbytes, digits):
            if memory is not None:
                return memory.gathered(x)
            out = x.new_empty([members, *x.shape])
            all_gather(out.view(-1), x.contiguous().view(-1), group=self.groups.of("activations", digits))
        return out

    def largest(self, x: Tensor, digits: Digits) -> Tensor:
        """Return the maximum over a group, without a gradient."""
        return self._reduced(x.detach(), digits, dist.ReduceOp.MAX) if digits else x.detach()


def column_of(x: Tensor) -> int:
    """The dimension of a tensor's features."""
    return column(x.dim())


class _Exchanged(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, by: BlockCollectives) -> Tensor:
        ctx.exchange, ctx.by = exchange, by
        return by.run(x, exchange, "forward")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.by.run(gradient, ctx.exchange.reversed, "backward"), None, None


class _Summed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, digits: Digits, by: BlockCollectives) -> Tensor:
        ctx.digits, ctx.by = digits, by
        return by.summed(x, digits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.by.summed(gradient, ctx.digits), None, None


class _Totalled(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, digits: Digits, by: BlockCollectives) -> Tensor:
        return by.summed(x, digits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None
