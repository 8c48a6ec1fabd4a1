"""Pareto-optimal edges from place to place, as columns of seconds and bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from harness.sbp.device_grid import Degree, Grid, Strategy
from harness.sbp.matmul_chain import Matmul
from harness.sbp.pareto import matches, pareto_optimal, ranks
from harness.sbp.route import Infeasible, Step, Steps
from harness.sbp.strategy_costs import Costs, Place, returns

RANKS = 32
"""Bits of the number of an edge."""
Side = Callable[[Matmul, Strategy], list[tuple[Place, Degree]]]


@dataclass(frozen=True)
class Edges:
    """One entry for each edge: indices of places, seconds and bytes; `steps(k)` are the steps of edge k."""

    source: np.ndarray
    target: np.ndarray
    seconds: np.ndarray
    bytes: np.ndarray
    steps: Callable[[int], Steps]

    def taken(self, which: np.ndarray) -> Edges:
        """Returns the edges with these indices."""
        return Edges(
            self.source[which],
            self.target[which],
            self.seconds[which],
            self.bytes[which],
            lambda k: self.steps(int(which[k])),
        )

    def best(self) -> Edges:
        """Returns the Pareto-optimal edges between each pair of places."""
        return self.taken(_best(self.source, self.target, self.seconds, self.bytes))

    def then(self, other: Edges) -> Edges:
        """Returns the Pareto-optimal paths along one of these and one of the other edges."""
        ones, others = matches(self.target, other.source)
        seconds, bytes_ = self.seconds[ones] + other.seconds[others], self.bytes[ones] + other.bytes[others]
        kept = _best(self.source[ones], other.target[others], seconds, bytes_)
        ones, others = ones[kept], others[kept]
        return Edges(
            self.source[ones],
            other.target[others],
            seconds[kept],
            bytes_[kept],
            lambda k: self.steps(int(ones[k])) + other.steps(int(others[k])),
        )


def _best(source: np.ndarray, target: np.ndarray, seconds: np.ndarray, bytes_: np.ndarray) -> np.ndarray:
    between = source * (int(target.max(initial=0)) + 1) + target
    return pareto_optimal((between << RANKS) + ranks(bytes_), ranks(seconds), RANKS)


def matmul_edges(costs: Costs, item: Matmul, strategies: Sequence[Strategy], whole: bool, free: float) -> Edges:
    """Returns the Pareto-optimal edges through a matmul.

    In a share `free` of the times it is multiplied, its input costs nothing. `whole`: outside of branches that must
    return to their layout, so that blocks may end in any order of the digits. Raises Infeasible if there are none.
    """
    enters = _sides(costs, item, strategies, costs.comes_from)
    leaves = _sides(costs, item, strategies, costs.goes_to)
    ones, others = matches(enters[0], leaves[0])
    if not whole:
        kept = _returning(costs.grid)[enters[2][ones], leaves[2][others]]
        ones, others = ones[kept], others[kept]
    if not len(ones):
        raise Infeasible(item.name, item.name)
    seconds = np.array([_seconds(costs, item, strategy, free) for strategy in strategies])
    held = np.array([costs.held(item, strategy) for strategy in strategies])
    chosen, source, target = enters[0][ones], enters[1][ones], leaves[1][others]

    def steps(k: int) -> Steps:
        places = costs.places[source[k]], costs.places[target[k]]
        return [Step(item, strategies[chosen[k]], *places, free=free > 0)]

    edges = Edges(source, target, seconds[chosen], held[chosen], steps)
    return edges.best() if len(strategies) > 1 else edges


def _sides(costs: Costs, item: Matmul, strategies: Sequence[Strategy], side: Side) -> np.ndarray:
    """Returns (3, edges): indices of strategy, place and degree, on one side of the matmul."""
    place_of = {place: i for i, place in enumerate(costs.places)}
    degree_of = {degree: i for i, degree in enumerate(costs.grid.degrees)}
    rows = [
        (k, place_of[place], degree_of[degree])
        for k, strategy in enumerate(strategies)
        for place, degree in side(item, strategy)
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 3).T


@lru_cache(maxsize=8)
def _returning(grid: Grid) -> np.ndarray:
    """Returns (degrees, degrees): `returns` of every pair."""
    return np.array([[returns(undone, split) for split in grid.degrees] for undone in grid.degrees])


def _seconds(costs: Costs, item: Matmul, strategy: Strategy, free: float) -> float:
    paid = costs.matmul_seconds(item, strategy, free=False) if free < 1 else 0.0
    return free * costs.matmul_seconds(item, strategy, free=True) + (1 - free) * paid if free else paid
