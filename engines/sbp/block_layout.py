"""Layouts of a tensor's blocks: digits of the device grid split its rows (samples) or its columns (features).

A digit is a prime factor of the grid: as many groups of devices as its size. A dimension is factored into an axis for
each digit that splits it, or once did, and the rest; a device has of each split axis the part with its own number.

    rows of 12, axes (digit 0 of 2, digit 1 of 3), digit 0 split     [ 0 1 | 2 3 | 4 5 ]  [ 6 7 | 8 9 | 10 11 ]
                                                                      device 0 of digit 0   device 1 of digit 0
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np

from harness.sbp.device_grid import Degree, Grid

Digits = tuple[int, ...]


@dataclass(frozen=True)
class Mesh:
    """The digits of a grid, the most significant of a rank first: those of nodes, then those of a node's devices."""

    grid: Grid

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(kind.prime for kind in self.grid.kinds for _ in range(kind.count))

    @cached_property
    def kinds(self) -> tuple[Digits, ...]:
        """The digits of each kind."""
        found, first = [], 0
        for kind in self.grid.kinds:
            found.append(tuple(range(first, first + kind.count)))
            first += kind.count
        return tuple(found)

    @property
    def all(self) -> Digits:
        return tuple(range(len(self.sizes)))

    @property
    def devices(self) -> int:
        return prod(self.sizes)

    def place(self, rank: int) -> tuple[int, ...]:
        """The number of a rank in each digit."""
        return tuple(int(n) for n in np.unravel_index(rank, self.sizes)) if self.sizes else ()

    def size(self, digits: Digits | frozenset[int]) -> int:
        return prod(self.sizes[digit] for digit in digits)

    def group(self, rank: int, digits: Digits) -> list[int]:
        """The ranks that differ from this one in these digits only, in the order of the digits as they are given."""
        place = list(self.place(rank))
        found = []
        for numbers in np.ndindex(*(self.sizes[digit] for digit in digits)):
            for digit, number in zip(digits, numbers, strict=True):
                place[digit] = number
            found.append(int(np.ravel_multi_index(place, self.sizes)) if self.sizes else 0)
        return found

    def count(self, digits: Digits) -> Degree:
        """Return the number of digits of each kind."""
        return tuple(sum(digit in kind for digit in digits) for kind in self.kinds)


@dataclass(frozen=True)
class Dim:
    """A dimension: the digits of its axes in order, and those of them that are split."""

    axes: Digits = ()
    split: frozenset[int] = frozenset()

    def like(self, other: Dim) -> bool:
        """Whether the blocks are the same: axes after the last one that is split make no difference."""
        return self.split == other.split and self.cut == other.cut

    @property
    def cut(self) -> Digits:
        """The axes up to the last one that is split. A block has a part for each number of the others."""
        last = max((n for n, axis in enumerate(self.axes) if axis in self.split), default=-1)
        return self.axes[: last + 1]

    def with_split(self, digits: Digits) -> Dim:
        """Split further, by new axes where there is none of that digit."""
        new = tuple(digit for digit in digits if digit not in self.axes)
        return Dim(self.axes + new, self.split | set(digits))

    def without(self, digits: Digits) -> Dim:
        """No longer split by these."""
        return Dim(self.axes, self.split - set(digits))

    def along(self, axes: Digits) -> Dim:
        """Return the same blocks with these axes, if they begin with the axes that split it; otherwise return it
        unchanged."""
        cut = self.cut
        return Dim(axes, self.split) if axes[: len(cut)] == cut else self

    def mine(self, size: int, mesh: Mesh, rank: int) -> np.ndarray:
        """The indices that a rank has of 0 .. size - 1, in its order. Raises ValueError where axes do not divide."""
        sizes = [mesh.sizes[axis] for axis in self.axes]
        rest, more = divmod(size, prod(sizes))
        if more:
            raise ValueError(f"{size} cannot be split into {' x '.join(map(str, sizes))}")
        place = mesh.place(rank)
        numbers = np.arange(size).reshape(*sizes, rest)
        found: np.ndarray = numbers[tuple(place[a] if a in self.split else slice(None) for a in self.axes)]
        return found.reshape(-1)


@dataclass(frozen=True)
class Layout:
    """Layout of a tensor with samples (dimension 0) and features: between matmuls each digit splits one of the two."""

    rows: Dim = Dim()
    columns: Dim = Dim()

    def like(self, other: Layout) -> bool:
        return self.rows.like(other.rows) and self.columns.like(other.columns)

    def merged(self, digits: Digits) -> Layout:
        return Layout(self.rows.without(digits), self.columns.without(digits))

    def split(self, rows: Digits = (), columns: Digits = ()) -> Layout:
        return Layout(self.rows.with_split(rows), self.columns.with_split(columns))

    def with_columns(self, columns: Dim) -> Layout:
        return replace(self, columns=columns)
