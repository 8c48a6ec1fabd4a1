"""The columns (features) that a tensor shows, dimension by dimension: whether a split of a product's output is, after
all that is done to it, the same split of what reads it.

A column's number is `offset` plus index times stride over all factors of all dimensions; dimensions of samples, tokens
and copies have stride 0:

    query (n, s, 12)           ((n, 0),)  ((s, 0),)  ((12, 1),)
    heads (n, 3, s, 4)         ((n, 0),)  ((3, 4),)  ((s, 0),)  ((4, 1),)

Operations among the columns of one head, such as rotary embedding, leave blocks of columns whole: from then on numbers
count to a `grain` of the head's width only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

Factor = tuple[int, int]
"""A size, and the stride in columns."""
Dim = tuple[Factor, ...]


@dataclass(frozen=True)
class Heads:
    """What attention reads of the columns of `sources`: from `offset` on `groups` heads of `size` columns, each of them
    for `heads` / `groups` neighbouring heads of queries."""

    sources: frozenset[int]
    width: int
    offset: int
    groups: int
    heads: int
    size: int


@dataclass(frozen=True)
class Columns:
    """Columns of `width` in all, of `sources`; equal `tensor` is the same tensor. `scores`: queries and keys that were
    multiplied."""

    width: int
    sources: frozenset[int]
    dims: tuple[Dim, ...]
    offset: int = 0
    grain: int = 1
    tensor: int = 0
    scores: tuple[Heads, Heads] | None = None

    def last(self, axis: int = -1) -> bool:
        """Whether all columns are in this dimension, in their order, and no other one."""
        if self == MIXED:
            return False
        return self.offset == 0 and self.grain == 1 and self.dims == plain(_sizes(self), self.width, axis)

    def per_head(self, samples: int, batch: Sequence[int], axis: int) -> Heads | None:
        """The heads in the dimensions `batch`, each with all its columns in `axis`; None where they are others."""
        size = prod(n for n, _ in self.dims[axis])
        blocks = _blocks(self, size)
        if blocks is None or size < self.grain:
            return None
        offset, dims = blocks
        first, *rest = (*merged(factor for n in batch for factor in dims[n]), (1, 0))
        copies, beyond = divmod(first[0], samples)
        if samples > 1 and (first[1] or beyond):
            return None
        row = merged([(copies, 0), *rest]) if samples > 1 else merged([first, *rest])
        heads, groups = prod(n for n, _ in row), row[0][0] if row and row[0][1] else 1
        elsewhere = any(stride for n, dim in enumerate(dims) if n not in batch for _, stride in dim)
        if elsewhere or any(stride for _, stride in row[1:]) or (row and row[0][1] not in (0, size)):
            return None
        return Heads(self.sources, self.width, offset, groups, heads, size)


MIXED = Columns(0, frozenset(), ())
"""Columns that were mixed with others, reordered, or left out."""


def plain(shape: Sequence[int], width: int, axis: int = -1) -> tuple[Dim, ...]:
    """The dimensions of a tensor that has all columns in one dimension."""
    at = axis % len(shape)
    return tuple(merged([(size, 1 if n == at and size == width else 0)]) for n, size in enumerate(shape))


def merged(factors: Iterable[Factor]) -> Dim:
    """Joins neighbours that are one factor; those of size 1 are left out."""
    found: list[Factor] = []
    for size, stride in factors:
        if size == 1:
            continue
        if found and found[-1][1] == size * stride:
            found[-1] = found[-1][0] * size, stride
        else:
            found.append((size, stride))
    return tuple(found)


def reshaped(columns: Columns, shape: Sequence[int]) -> Columns:
    """As another shape, in the order of elements."""
    left = list(merged(factor for dim in columns.dims for factor in dim))
    dims: list[Dim] = []
    for wanted in shape:
        dim: list[Factor] = []
        while wanted > 1 and left:
            size, stride = left.pop(0)
            if wanted % size == 0:
                dim.append((size, stride))
                wanted //= size
            elif size % wanted == 0:
                dim.append((wanted, stride * size // wanted))
                left.insert(0, (size // wanted, stride))
                wanted = 1
            else:
                return MIXED
        dims.append(merged(dim))
    return replace(columns, dims=tuple(dims))


def expanded(columns: Columns, shape: Sequence[int]) -> Columns:
    """Broadcast to a shape."""
    sizes = (1,) * (len(shape) - len(columns.dims)) + _sizes(columns)
    dims = ((),) * (len(shape) - len(columns.dims)) + columns.dims
    copied = (merged([(wanted, 0)]) if size == 1 else dim for size, wanted, dim in zip(sizes, shape, dims, strict=True))
    return replace(columns, dims=tuple(copied))


def sliced(columns: Columns, axis: int, first: int, count: int, step: int = 1) -> Columns:
    """Every `step`-th index of a dimension, `count` of them."""
    dim = columns.dims[axis]
    if count == prod(size for size, _ in dim):
        return columns
    if len(dim) != 1:
        return MIXED
    stride = dim[0][1]
    dims = list(columns.dims)
    dims[axis] = merged([(count, stride * step)])
    return replace(columns, dims=tuple(dims), offset=columns.offset + first * stride)


def combined(operands: Sequence[Columns], mixed: Sequence[int] = ()) -> Columns:
    """Element by element, or over the dimensions `mixed` too: with the finest grain at which all operands, of the same
    shape but in these dimensions, show the same columns. There `mixed` dimensions show none."""
    first, least = operands[0], max(one.grain for one in operands)
    if MIXED in operands or len({one.width for one in operands}) > 1:
        return MIXED
    strides = {stride for one in operands for dim in one.dims for _, stride in dim}
    for grain in sorted({1, *strides} - {0}):
        found = [_blocks(one, grain) for one in operands] if grain >= least else [None]
        shown = [block and (block[0], _without(block[1], mixed)) for block in found]
        if shown[0] is None or shown.count(shown[0]) < len(shown):
            continue
        offset, dims = shown[0]
        if any(stride for block in found if block for n in mixed for _, stride in block[1][n]):
            continue
        if grain > 1 and not any(stride for dim in dims for _, stride in dim):
            return MIXED
        kept = tuple(
            merged((size, 0) for size, _ in first.dims[n]) if n in mixed else dim for n, dim in enumerate(dims)
        )
        of_all = frozenset[int]().union(*(one.sources for one in operands))
        scores = first.scores if all(one.scores == first.scores for one in operands) else None
        return Columns(first.width, of_all, kept, offset, grain, scores=scores)
    return MIXED


def _without(dims: tuple[Dim, ...], which: Sequence[int]) -> tuple[Dim, ...]:
    return tuple(() if n in which else dim for n, dim in enumerate(dims))


def _blocks(columns: Columns, grain: int) -> tuple[int, tuple[Dim, ...]] | None:
    """The offset and the dimensions of the blocks of `grain` columns; None where one element of the tensor's finer
    dimensions is in another block than the next."""
    fine = columns.offset % grain + sum(
        (size - 1) * stride for dim in columns.dims for size, stride in dim if stride < grain
    )
    coarse = [stride for dim in columns.dims for _, stride in dim if stride >= grain]
    if fine >= grain or any(stride % grain for stride in coarse) or columns.width % grain:
        return None
    dims = tuple(merged((size, stride if stride >= grain else 0) for size, stride in dim) for dim in columns.dims)
    return columns.offset - columns.offset % grain, dims


def _sizes(columns: Columns) -> tuple[int, ...]:
    return tuple(prod(size for size, _ in dim) for dim in columns.dims)
