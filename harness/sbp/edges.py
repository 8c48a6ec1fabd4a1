"""Ways from place to place as columns: all that are worth it for some price of a byte, seconds and bytes of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from harness.sbp.chain import Matmul
from harness.sbp.costs import Costs, Place, returns
from harness.sbp.grid import Degree, Grid, Strategy
from harness.sbp.pareto import matches, ranks, undominated
from harness.sbp.route import Infeasible, Step, Steps

RANKS = 32
"""Bits of the number of an edge."""
Side = Callable[[Matmul, Strategy], list[tuple[Place, Degree]]]


@dataclass(frozen=True)
class Edges:
    """An entry a way: numbers of places, seconds and bytes; `steps` tells what happens on the way of a number."""

    source: np.ndarray
    target: np.ndarray
    seconds: np.ndarray
    bytes: np.ndarray
    steps: Callable[[int], Steps]

    def taken(self, which: np.ndarray) -> Edges:
        """Those of these numbers."""
        return Edges(
            self.source[which], self.target[which], self.seconds[which], self.bytes[which],
            lambda k: self.steps(int(which[k])),
        )  # fmt: skip

    def best(self) -> Edges:
        """Those that no other one between the same places dominates."""
        return self.taken(_best(self.source, self.target, self.seconds, self.bytes))

    def then(self, other: Edges) -> Edges:
        """The best ways along one of these and one of the others."""
        ones, others = matches(self.target, other.source)
        seconds, bytes_ = self.seconds[ones] + other.seconds[others], self.bytes[ones] + other.bytes[others]
        kept = _best(self.source[ones], other.target[others], seconds, bytes_)
        ones, others = ones[kept], others[kept]
        return Edges(
            self.source[ones], other.target[others], seconds[kept], bytes_[kept],
            lambda k: self.steps(int(ones[k])) + other.steps(int(others[k])),
        )  # fmt: skip


def _best(source: np.ndarray, target: np.ndarray, seconds: np.ndarray, bytes_: np.ndarray) -> np.ndarray:
    between = source * (int(target.max(initial=0)) + 1) + target
    return undominated((between << RANKS) + ranks(bytes_), ranks(seconds), RANKS)


def of_product(costs: Costs, item: Matmul, strategies: Sequence[Strategy], whole: bool, free: float) -> Edges:
    """The best ways through a product. Its input costs nothing in a share `free` of the times it is multiplied.

    `whole`: outside of what has to come back, where blocks may come to lie in any order of the digits. Raises
    Infeasible where there are none.
    """
    enters = _sides(costs, item, strategies, costs.comes_from)
    leaves = _sides(costs, item, strategies, costs.goes_to)
    ones, others = matches(enters[0], leaves[0])
    if not whole:
        comes_back = _returning(costs.grid)[enters[2][ones], leaves[2][others]]
        ones, others = ones[comes_back], others[comes_back]
    if not len(ones):
        raise Infeasible(item.name)
    seconds = np.array([_seconds(costs, item, strategy, free) for strategy in strategies])
    held = np.array([costs.held(item, strategy) for strategy in strategies])
    chosen, source, target = enters[0][ones], enters[1][ones], leaves[1][others]

    def steps(k: int) -> Steps:
        places = costs.places[source[k]], costs.places[target[k]]
        return [Step(item, strategies[chosen[k]], *places, free=free > 0)]

    found = Edges(source, target, seconds[chosen], held[chosen], steps)
    return found.best() if len(strategies) > 1 else found


def _sides(costs: Costs, item: Matmul, strategies: Sequence[Strategy], side: Side) -> np.ndarray:
    """(3, ways to come or to go): the numbers of strategy, place and degree."""
    place_of = {place: i for i, place in enumerate(costs.places)}
    degree_of = {degree: i for i, degree in enumerate(costs.grid.degrees)}
    rows = [
        (k, place_of[place], degree_of[degree])
        for k, strategy in enumerate(strategies) for place, degree in side(item, strategy)
    ]  # fmt: skip
    return np.array(rows, dtype=np.int64).reshape(-1, 3).T


@lru_cache(maxsize=8)
def _returning(grid: Grid) -> np.ndarray:
    """`returns` of every two degrees."""
    return np.array([[returns(undone, split) for split in grid.degrees] for undone in grid.degrees])


def _seconds(costs: Costs, item: Matmul, strategy: Strategy, free: float) -> float:
    paid = costs.product(item, strategy, free=False) if free < 1 else 0.0
    return free * costs.product(item, strategy, free=True) + (1 - free) * paid if free else paid
