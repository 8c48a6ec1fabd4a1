"""How a block goes through an exchange: its axes in the order in which members of a group get their parts, and back.

    block      (rows, ..., columns)
    opened     (d0, d1, rows', ..., columns')    an axis for each digit that does not split it
    sent       those of leaving digits in front: a part for each member
    received   those of arriving digits in front: a part from each member
    closed     each axis in the rows or columns that it is a part of now

Free of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from engines.sbp.instruction import Exchange
from engines.sbp.layout import Digits, Dim, Layout, Mesh

Name = tuple[int, int]
"""A dimension, and a digit that is an axis of it; what is left of the dimension is REST."""
REST = -1


@dataclass(frozen=True)
class Way:
    """Shapes `opened`, `received` and `closed`; the permutation before the collective and the one behind it."""

    opened: tuple[int, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]
    back: tuple[int, ...]
    closed: tuple[int, ...]


def way(shape: Sequence[int], exchange: Exchange, mesh: Mesh) -> Way:
    """Of a block of this shape."""
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
    return Way(
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
    """A local block's axes: those of digits that do not split it, and what is left of each dimension."""
    names: list[Name] = []
    for n in range(dims):
        axes, split = _axes(n, column(dims), exchange, layout)
        names += [*((n, axis) for axis in axes if axis not in split), (n, REST)]
    return names


def _axes(n: int, column: int, exchange: Exchange, layout: Layout) -> tuple[Digits, frozenset[int]]:
    """Of dimension n: the axes that it has on either side of the exchange, and those that split it in a layout."""
    if n not in (0, column):
        return (), frozenset()
    dims: tuple[Dim, Dim] = (
        (exchange.before.rows, exchange.after.rows) if n == 0 else (exchange.before.columns, exchange.after.columns)
    )
    axes = max((dim.axes for dim in dims), key=len)
    return axes, (layout.rows if n == 0 else layout.columns).split
