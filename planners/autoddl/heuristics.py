"""The searches of the AutoDDL paper (section 4.6), with a count of evaluated plans, against which the exact one stands.

exhaustive            every plan, in blocks
random                uniform plans
metropolis_hastings   one layer changes at a time; worse plans are taken with probability exp(-beta (new - old))
coordinate_descent    the best strategy of one layer, the others given, until nothing changes; again elsewhere
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from harness.sbp.chain import Matmul
from harness.sbp.grid import Strategy
from harness.sbp.optimum import Infeasible, Route, Search

BLOCK = 1 << 20
"""Plans that are evaluated at once, at most."""
COLDNESS = 20.0
"""Metropolis-Hastings' beta, in units of 1 / the seconds of its first plan."""
Plan = tuple[int, ...]
"""The number of each product's strategy."""


@dataclass
class Found:
    """The best plan; `history` has (plans evaluated, seconds of the best so far) for every improvement."""

    route: Route
    evaluations: int
    history: list[tuple[int, float]]


@dataclass
class Tally:
    """Counts evaluations, keeps the best."""

    limit: int
    evaluations: int = 0
    best: Plan = ()
    seconds: float = float("inf")
    history: list[tuple[int, float]] = field(default_factory=list)

    def count(self, plan: Plan, seconds: float, plans: int = 1) -> None:
        """`plans` were evaluated, of which this one is the best."""
        self.evaluations += plans
        if seconds < self.seconds:
            self.best, self.seconds = plan, seconds
            self.history.append((self.evaluations, seconds))

    @property
    def spent(self) -> bool:
        return self.evaluations >= self.limit


class Space:
    """All plans of a chain, and what they cost.

    In a row of products without branches a plan costs a number for each product and one for each pair of neighbours.
    """

    def __init__(self, search: Search) -> None:
        self.search = search
        self.strategies = [search.strategies(item) for item in search.matmuls]
        for item, own in zip(search.matmuls, self.strategies, strict=True):
            if not own:
                raise Infeasible(item.name)
        self.row = all(isinstance(item, Matmul) for item in search.chain.items) and not search.ties()
        if self.row:
            self.own, self.pairs = self._tables()

    @property
    def sizes(self) -> list[int]:
        return [len(own) for own in self.strategies]

    def seconds(self, plan: Plan) -> float:
        """Of one plan; infinite for one that cannot be."""
        if self.row:
            pairs = sum(table[a, b] for table, a, b in zip(self.pairs, plan, plan[1:], strict=False))
            return float(sum(own[a] for own, a in zip(self.own, plan, strict=True)) + pairs)
        try:
            return self.route(plan).seconds
        except Infeasible:
            return float("inf")

    def around(self, plan: Plan, k: int) -> np.ndarray:
        """Of all plans that differ from this one in product k only, up to what they have in common."""
        if not self.row:
            return np.array([self.seconds((*plan[:k], s, *plan[k + 1 :])) for s in range(len(self.strategies[k]))])
        found: np.ndarray = self.own[k].copy()
        if k:
            found += self.pairs[k - 1][plan[k - 1]]
        if k + 1 < len(plan):
            found += self.pairs[k][:, plan[k + 1]]
        return found

    def route(self, plan: Plan) -> Route:
        names = [item.name for item in self.search.matmuls]
        chosen: dict[str, Strategy] = {n: own[s] for n, own, s in zip(names, self.strategies, plan, strict=True)}
        return Search(self.search.chain, self.search.costs, self.search.ends, chosen).route()

    def _tables(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        search, costs = self.search, self.search.costs
        number = {place: i for i, place in enumerate(costs.places)}
        enters: list[np.ndarray] = []
        leaves: list[np.ndarray] = []
        own: list[np.ndarray] = []
        for k, (item, strategies) in enumerate(zip(search.matmuls, self.strategies, strict=True)):
            free = k == 0 and search.ends == "free"
            own.append(np.array([costs.product(item, strategy, free) for strategy in strategies]))
            for sides, found in ((costs.comes_from, enters), (costs.goes_to, leaves)):
                where = np.full((len(strategies), len(number)), np.inf)
                for s, strategy in enumerate(strategies):
                    where[s, [number[place] for place, _ in sides(item, strategy)]] = 0.0
                found.append(where)
        own[0] += (enters[0] + search.start().seconds).min(1)
        own[-1] += (leaves[-1] + search.end().seconds[:, 0]).min(1)
        pairs = []
        for k, item in enumerate(search.matmuls[1:], start=1):
            moved = _through(leaves[k - 1], costs.moving(item.input_elements))
            pairs.append(_through(moved, enters[k].T))
        return own, pairs


def _through(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The shortest ways by two matrices of ways."""
    result: np.ndarray = (left[:, :, None] + right[None, :, :]).min(1)
    return result


def exhaustive(space: Space, tally: Tally, draw: np.random.Generator) -> None:
    """Every plan, the last products' in one block where they are a row."""
    if not space.row:
        for plan in np.ndindex(*space.sizes):
            tally.count(plan, space.seconds(plan))
        return
    inner = len(space.sizes)
    while inner > 0 and np.prod(space.sizes[inner - 1 :], dtype=float) <= BLOCK:
        inner -= 1
    inner = max(inner, 1)
    block = _sums(space, inner)
    for outer in np.ndindex(*space.sizes[:inner]):
        fixed = sum(space.own[k][s] for k, s in enumerate(outer))
        fixed += sum(space.pairs[k][a, b] for k, (a, b) in enumerate(pairwise(outer)))
        join = space.pairs[inner - 1][outer[-1]] if inner < len(space.sizes) else np.zeros(())
        costs = fixed + block + join.reshape(join.shape + (1,) * (block.ndim - join.ndim))
        at = int(costs.argmin())
        best = tuple(int(s) for s in np.unravel_index(at, costs.shape)) if costs.ndim else ()
        tally.count((*outer, *best), float(costs.flat[at]), costs.size)


def _sums(space: Space, first: int) -> np.ndarray:
    """What the products from `first` on cost, for all their plans."""
    dims = len(space.sizes) - first
    total = np.zeros(space.sizes[first:])
    for k in range(dims):
        shape = [1] * dims
        shape[k] = space.sizes[first + k]
        total += space.own[first + k].reshape(shape)
        if k:
            shape[k - 1] = space.sizes[first + k - 1]
            total += space.pairs[first + k - 1].reshape(shape)
    return total


def random(space: Space, tally: Tally, draw: np.random.Generator) -> None:
    """Uniform plans."""
    while not tally.spent:
        plan = tuple(int(draw.integers(size)) for size in space.sizes)
        tally.count(plan, space.seconds(plan))


def metropolis_hastings(space: Space, tally: Tally, draw: np.random.Generator) -> None:
    """A chain of plans whose probability falls with their seconds, one layer changed at a time."""
    plan = tuple(int(draw.integers(size)) for size in space.sizes)
    at = space.seconds(plan)
    tally.count(plan, at)
    beta = COLDNESS / at if 0 < at < float("inf") else COLDNESS
    while not tally.spent:
        k = int(draw.integers(len(plan)))
        other = (*plan[:k], int(draw.integers(space.sizes[k])), *plan[k + 1 :])
        seconds = space.seconds(other)
        tally.count(other, seconds)
        if seconds <= at or draw.random() < np.exp(-beta * (seconds - at)):
            plan, at = other, seconds


def coordinate_descent(space: Space, tally: Tally, draw: np.random.Generator) -> None:
    """Sweeps over the layers to a fixed point, again from another start until the evaluations are spent."""
    while not tally.spent:
        plan = tuple(int(draw.integers(size)) for size in space.sizes)
        for better in _descended(space, plan, tally):
            plan = better


def _descended(space: Space, plan: Plan, tally: Tally) -> Iterator[Plan]:
    changed = True
    while changed and not tally.spent:
        changed = False
        for k in range(len(plan)):
            costs = space.around(plan, k)
            best = int(costs.argmin())
            if costs[best] < costs[plan[k]]:
                plan, changed = (*plan[:k], best, *plan[k + 1 :]), True
                yield plan
            tally.count(plan, space.seconds(plan), len(costs))


SEARCHES: dict[str, Callable[[Space, Tally, np.random.Generator], Any]] = {
    "exhaustive": exhaustive,
    "random": random,
    "metropolis_hastings": metropolis_hastings,
    "coordinate_descent": coordinate_descent,
}


def find(search: Search, name: str, evaluations: int, seed: int) -> Found:
    """The best plan that the search of that name comes to. Raises Infeasible where it finds none."""
    space, tally = Space(search), Tally(evaluations)
    SEARCHES[name](space, tally, np.random.default_rng(seed))
    if not tally.best:
        raise Infeasible(f"none of {tally.evaluations} plans can be: {search.matmuls[0].name}")
    return Found(space.route(tally.best), tally.evaluations, tally.history)
