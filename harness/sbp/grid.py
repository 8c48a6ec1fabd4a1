"""A grid of devices, and all ways to cut it into factors.

Its digits are the prime factors of its nodes and of the devices of a node. A degree takes some of them: a factor of the
grid of which is known how much of it lies across nodes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from operator import add, sub
from typing import NamedTuple

Degree = tuple[int, ...]
"""How many digits of each kind of a grid."""


@dataclass(frozen=True)
class Kind:
    """`count` digits of one size, all across nodes or all inside of them."""

    prime: int
    across: bool
    count: int


class Strategy(NamedTuple):
    """Into how many parts a product is cut: rows (p0), columns of the weight (p1), what is summed over (p2)."""

    p0: Degree
    p1: Degree
    p2: Degree


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
        """Of every degree: searches ask for them often."""
        return {degree: (self._taken(degree, across=True), self._taken(degree, across=False))
                for degree in product(*(range(kind.count + 1) for kind in self.kinds))}  # fmt: skip

    def _taken(self, degree: Degree, across: bool) -> int:
        return prod(kind.prime**n for kind, n in zip(self.kinds, degree, strict=True) if kind.across == across)

    @cached_property
    def strategies(self) -> list[Strategy]:
        """Every factorization p0 p1 p2 of the grid."""
        ways = [[(a, b, kind.count - a - b) for a in range(kind.count + 1) for b in range(kind.count + 1 - a)]
                for kind in self.kinds]  # fmt: skip
        return [Strategy(*(tuple(way[i] for way in chosen) for i in range(3))) for chosen in product(*ways)]

    def size(self, degree: Degree) -> int:
        """How many devices."""
        nodes, local = self._parts[degree]
        return nodes * local

    def parts(self, degree: Degree) -> tuple[int, int]:
        """The same as (nodes, devices of each)."""
        return self._parts[degree]

    def degree(self, nodes: int, local: int) -> Degree:
        """The inverse of `parts`. Raises ValueError for what does not divide the grid."""
        found = []
        for kind in self.kinds:
            rest, taken = nodes if kind.across else local, 0
            while rest % kind.prime == 0:
                rest, taken = rest // kind.prime, taken + 1
            found.append(taken)
        degree = tuple(found)
        too_many = any(taken > kind.count for taken, kind in zip(degree, self.kinds, strict=True))
        if too_many or self.parts(degree) != (nodes, local):
            raise ValueError(f"{nodes} x {local} does not divide {self.nodes} nodes of {self.local} devices")
        return degree

    def numbers(self, strategy: Strategy) -> tuple[int, ...]:
        """(p0, p1, p2); on several nodes of several devices (nodes, devices of each) for each of the three."""
        if self.nodes > 1 and self.local > 1:
            return tuple(number for degree in strategy for number in self.parts(degree))
        return tuple(self.size(degree) for degree in strategy)

    def strategy(self, numbers: tuple[int, ...]) -> Strategy:
        """The inverse of `numbers`. Raises ValueError for numbers that are no strategy of this grid."""
        several = self.nodes > 1 and self.local > 1
        if len(numbers) != (6 if several else 3) or prod(numbers) != self.nodes * self.local:
            raise ValueError(f"{list(numbers)} is no strategy for {self.nodes} nodes of {self.local} devices")
        if several:
            return Strategy(*(self.degree(numbers[i], numbers[i + 1]) for i in (0, 2, 4)))
        return Strategy(*(self.degree(n, 1) if self.nodes > 1 else self.degree(1, n) for n in numbers))


def minus(one: Degree, other: Degree) -> Degree:
    return tuple(map(sub, one, other))


def plus(one: Degree, other: Degree) -> Degree:
    return tuple(map(add, one, other))


def below(degree: Degree) -> list[Degree]:
    """All that take some of its digits, or none, or all."""
    return list(product(*(range(taken + 1) for taken in degree)))


def _primes(number: int) -> list[int]:
    found, prime = [], 2
    while prime * prime <= number:
        while number % prime == 0:
            found.append(prime)
            number //= prime
        prime += 1
    return found + [number] * (number > 1)
