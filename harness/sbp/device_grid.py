"""A grid of devices, and all its factorizations.

Its digits are the prime factors of its nodes and of the devices of a node. A degree takes some of them: it is a factor
of the grid, and says how much of it is across nodes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from operator import add, sub
from typing import NamedTuple

Degree = tuple[int, ...]
"""The number of digits of each kind of a grid."""


@dataclass(frozen=True)
class Kind:
    """`count` digits of one size, all across nodes or all inside nodes."""

    prime: int
    across: bool
    count: int


class Strategy(NamedTuple):
    """Into how many parts a matmul is cut: rows (p0), columns of the weight (p1), what is summed over (p2)."""

    p0: Degree
    p1: Degree
    p2: Degree


class Summa(NamedTuple):
    """A mesh rows x columns of all devices: a matmul's tensors are split into as many blocks (`harness.sbp.summa`)."""

    rows: Degree
    columns: Degree


@dataclass(frozen=True)
class Grid:
    """`nodes` x `local` devices."""

    nodes: int
    local: int

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        return tuple(
            Kind(prime, across, count)
            for size, across in ((self.nodes, True), (self.local, False))
            for prime, count in sorted(Counter(_primes(size)).items())
        )

    @cached_property
    def all(self) -> Degree:
        """The degree that takes every digit."""
        return tuple(kind.count for kind in self.kinds)

    @property
    def none(self) -> Degree:
        return (0,) * len(self.kinds)

    @cached_property
    def degrees(self) -> list[Degree]:
        """Every degree, the smallest first."""
        return sorted(self._parts, key=lambda degree: (self.size(degree), degree))

    @cached_property
    def _parts(self) -> dict[Degree, tuple[int, int]]:
        """(nodes, devices of each) of every degree, cached for searches."""
        return {
            degree: (self._taken(degree, across=True), self._taken(degree, across=False))
            for degree in product(*(range(kind.count + 1) for kind in self.kinds))
        }

    def _taken(self, degree: Degree, across: bool) -> int:
        return prod(kind.prime**n for kind, n in zip(self.kinds, degree, strict=True) if kind.across == across)

    @cached_property
    def strategies(self) -> list[Strategy]:
        """Every factorization p0 p1 p2 of the grid."""
        splits = [
            [(a, b, kind.count - a - b) for a in range(kind.count + 1) for b in range(kind.count + 1 - a)]
            for kind in self.kinds
        ]
        return [Strategy(*(tuple(split[i] for split in chosen) for i in range(3))) for chosen in product(*splits)]

    def size(self, degree: Degree) -> int:
        """Returns the number of devices of a degree."""
        nodes, local = self._parts[degree]
        return nodes * local

    def parts(self, degree: Degree) -> tuple[int, int]:
        """Returns a degree as (nodes, devices of each)."""
        return self._parts[degree]

    def degree(self, nodes: int, local: int) -> Degree:
        """Inverts `parts`. Raises ValueError for numbers that do not divide the grid."""
        digits = []
        for kind in self.kinds:
            rest, taken = nodes if kind.across else local, 0
            while rest % kind.prime == 0:
                rest, taken = rest // kind.prime, taken + 1
            digits.append(taken)
        degree = tuple(digits)
        too_many = any(taken > kind.count for taken, kind in zip(degree, self.kinds, strict=True))
        if too_many or self.parts(degree) != (nodes, local):
            raise ValueError(f"{nodes} x {local} does not divide {self.nodes} nodes of {self.local} devices")
        return degree

    def numbers(self, strategy: Strategy | Summa) -> tuple[int, ...]:
        """Returns (p0, p1, p2), or (rows, columns); on several nodes of several devices (nodes, devices of each) for
        each of them."""
        if self.nodes > 1 and self.local > 1:
            return tuple(number for degree in strategy for number in self.parts(degree))
        return tuple(self.size(degree) for degree in strategy)

    def strategy(self, numbers: tuple[int, ...]) -> Strategy:
        """Inverts `numbers`. Raises ValueError for numbers that are not a strategy of this grid."""
        return Strategy(*self._degrees(numbers, 3))

    def strategy_or_mesh(self, numbers: tuple[int, ...]) -> Strategy | Summa:
        """Inverts `numbers`, those of a mesh, too. Raises ValueError for other numbers."""
        return _read(self, tuple(numbers))

    def _degrees(self, numbers: tuple[int, ...], count: int) -> list[Degree]:
        several = self.nodes > 1 and self.local > 1
        if len(numbers) != count * (1 + several) or prod(numbers) != self.nodes * self.local:
            raise ValueError(f"{list(numbers)} is not a strategy for {self.nodes} nodes of {self.local} devices")
        if several:
            return [self.degree(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]
        return [self.degree(n, 1) if self.nodes > 1 else self.degree(1, n) for n in numbers]


@lru_cache(maxsize=1024)
def _read(grid: Grid, numbers: tuple[int, ...]) -> Strategy | Summa:
    mesh = len(numbers) in (2, 4)
    return Summa(*grid._degrees(numbers, 2)) if mesh else grid.strategy(numbers)


@lru_cache(maxsize=256)
def grid_of(nodes: int, local: int) -> Grid:
    """Returns a grid, which keeps what it has counted: plans are read again and again."""
    return Grid(nodes, local)


def minus(degree: Degree, other: Degree) -> Degree:
    """Returns the digits of `degree` without those of `other`."""
    return tuple(map(sub, degree, other))


def plus(degree: Degree, other: Degree) -> Degree:
    """Returns the digits of both degrees."""
    return tuple(map(add, degree, other))


def below(degree: Degree) -> list[Degree]:
    """Returns all degrees that take some of its digits, none, or all."""
    return list(product(*(range(taken + 1) for taken in degree)))


def _primes(number: int) -> list[int]:
    factors, prime = [], 2
    while prime * prime <= number:
        while number % prime == 0:
            factors.append(prime)
            number //= prime
        prime += 1
    return factors + [number] * (number > 1)
