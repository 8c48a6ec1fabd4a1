"""The searches of the AutoDDL paper (section 4.6), with a count of evaluated plans; the exact search is the reference.

exhaustive            every plan, in blocks
random                uniform plans
metropolis_hastings   one layer changes at a time; worse plans are accepted with probability exp(-beta (new - old))
coordinate_descent    the best strategy of one layer, the others fixed, until nothing changes; then from another start
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from harness.sbp.device_grid import Strategy
from harness.sbp.matmul_chain import Matmul
from harness.sbp.shortest_path import Infeasible, Route, Search

BLOCK = 1 << 20
"""The most plans that are evaluated at once."""
COLDNESS = 20.0
"""Metropolis-Hastings' beta, in units of 1 / the seconds of its first plan."""
Plan = tuple[int, ...]
"""The index of each matmul's strategy."""


@dataclass
class SearchResult:
    """The best plan; `history` has (plans evaluated, seconds of the best so far) for every improvement.

    `elapsed_s` has the seconds that the search had run at each of them, and `search_s` those of the whole search, from
    when the tables of costs were made.
    """

    route: Route
    evaluations: int
    history: list[tuple[int, float]]
    elapsed_s: list[float]
    search_s: float


@dataclass
class EvaluationCounter:
    """Counts evaluations, takes their time and keeps the best plan."""

    limit: int
    evaluations: int = 0
    best: Plan = ()
    seconds: float = float("inf")
    history: list[tuple[int, float]] = field(default_factory=list)
    elapsed_s: list[float] = field(default_factory=list)
    began_s: float = field(default_factory=time.perf_counter)

    def count(self, plan: Plan, seconds: float, plans: int = 1) -> None:
        """Adds `plans` evaluations, of which this one is the best."""
        self.evaluations += plans
        if seconds < self.seconds:
            self.best, self.seconds = plan, seconds
            self.history.append((self.evaluations, seconds))
            self.elapsed_s.append(self.since_begin_s)

    @property
    def since_begin_s(self) -> float:
        return time.perf_counter() - self.began_s

    @property
    def spent(self) -> bool:
        return self.evaluations >= self.limit


class Space:
    """All plans of a chain, and what they cost.

    In a row of matmuls without branches the cost of a plan is a sum over matmuls and pairs of neighbours.
    """

    def __init__(self, search: Search) -> None:
        self.search = search
        self.strategies = [search.strategies(item) for item in search.matmuls]
        for item, strategies in zip(search.matmuls, self.strategies, strict=True):
            if not strategies:
                raise Infeasible(item.name, item.name)
        self.row = all(isinstance(item, Matmul) for item in search.chain.items) and not search.ties()
        if self.row:
            self.own, self.pairs = self._tables()

    @property
    def sizes(self) -> list[int]:
        return [len(strategies) for strategies in self.strategies]

    def seconds(self, plan: Plan) -> float:
        """Returns the seconds of one plan; infinite for an impossible one."""
        if self.row:
            pairs = sum(table[a, b] for table, a, b in zip(self.pairs, plan, plan[1:], strict=False))
            return float(sum(costs[a] for costs, a in zip(self.own, plan, strict=True)) + pairs)
        try:
            return self.route(plan).seconds
        except Infeasible:
            return float("inf")

    def around(self, plan: Plan, k: int) -> np.ndarray:
        """Returns the seconds of all plans that differ from this one in matmul k only, up to a common constant."""
        if not self.row:
            return np.array([self.seconds((*plan[:k], s, *plan[k + 1 :])) for s in range(len(self.strategies[k]))])
        seconds: np.ndarray = self.own[k].copy()
        if k:
            seconds += self.pairs[k - 1][plan[k - 1]]
        if k + 1 < len(plan):
            seconds += self.pairs[k][:, plan[k + 1]]
        return seconds

    def route(self, plan: Plan) -> Route:
        names = [item.name for item in self.search.matmuls]
        chosen: dict[str, Strategy] = {
            n: strategies[s] for n, strategies, s in zip(names, self.strategies, plan, strict=True)
        }
        return Search(self.search.chain, self.search.costs, self.search.ends, chosen).route()

    def _tables(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        search, costs = self.search, self.search.costs
        number = {place: i for i, place in enumerate(costs.places)}
        enters: list[np.ndarray] = []
        leaves: list[np.ndarray] = []
        costs_of: list[np.ndarray] = []
        for k, (item, strategies) in enumerate(zip(search.matmuls, self.strategies, strict=True)):
            free = k == 0 and search.ends == "free"
            costs_of.append(np.array([costs.matmul_seconds(item, strategy, free) for strategy in strategies]))
            for sides, tables in ((costs.comes_from, enters), (costs.goes_to, leaves)):
                where = np.full((len(strategies), len(number)), np.inf)
                for s, strategy in enumerate(strategies):
                    where[s, [number[place] for place, _ in sides(item, strategy)]] = 0.0
                tables.append(where)
        costs_of[0] += (enters[0] + search.start().seconds).min(1)
        costs_of[-1] += (leaves[-1] + search.end().seconds[:, 0]).min(1)
        pairs = []
        for k, item in enumerate(search.matmuls[1:], start=1):
            moved = _through(leaves[k - 1], costs.moving(item.input_elements))
            pairs.append(_through(moved, enters[k].T))
        return costs_of, pairs


def _through(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Returns the shortest paths through two matrices of paths."""
    result: np.ndarray = (left[:, :, None] + right[None, :, :]).min(1)
    return result


def exhaustive(space: Space, counter: EvaluationCounter, draw: np.random.Generator) -> None:
    """Evaluates every plan, the last matmuls in one block where they are a row."""
    if not space.row:
        for plan in np.ndindex(*space.sizes):
            counter.count(plan, space.seconds(plan))
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
        counter.count((*outer, *best), float(costs.flat[at]), costs.size)


def _sums(space: Space, first: int) -> np.ndarray:
    """Returns the cost of the matmuls from `first` on, for all their plans."""
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


def random(space: Space, counter: EvaluationCounter, draw: np.random.Generator) -> None:
    """Evaluates uniformly random plans."""
    while not counter.spent:
        plan = tuple(int(draw.integers(size)) for size in space.sizes)
        counter.count(plan, space.seconds(plan))


def metropolis_hastings(space: Space, counter: EvaluationCounter, draw: np.random.Generator) -> None:
    """Samples plans whose probability falls with their seconds, changing one layer at a time."""
    plan = tuple(int(draw.integers(size)) for size in space.sizes)
    at = space.seconds(plan)
    counter.count(plan, at)
    beta = COLDNESS / at if 0 < at < float("inf") else COLDNESS
    while not counter.spent:
        k = int(draw.integers(len(plan)))
        other = (*plan[:k], int(draw.integers(space.sizes[k])), *plan[k + 1 :])
        seconds = space.seconds(other)
        counter.count(other, seconds)
        if seconds <= at or draw.random() < np.exp(-beta * (seconds - at)):
            plan, at = other, seconds


def coordinate_descent(space: Space, counter: EvaluationCounter, draw: np.random.Generator) -> None:
    """Sweeps over the layers to a fixed point, then from another start, until the evaluations are spent."""
    while not counter.spent:
        plan = tuple(int(draw.integers(size)) for size in space.sizes)
        for better in _descend(space, plan, counter):
            plan = better


def _descend(space: Space, plan: Plan, counter: EvaluationCounter) -> Iterator[Plan]:
    changed = True
    while changed and not counter.spent:
        changed = False
        for k in range(len(plan)):
            costs = space.around(plan, k)
            best = int(costs.argmin())
            if costs[best] < costs[plan[k]]:
                plan, changed = (*plan[:k], best, *plan[k + 1 :]), True
                yield plan
            counter.count(plan, space.seconds(plan), len(costs))


SEARCHES: dict[str, Callable[[Space, EvaluationCounter, np.random.Generator], Any]] = {
    "exhaustive": exhaustive,
    "random": random,
    "metropolis_hastings": metropolis_hastings,
    "coordinate_descent": coordinate_descent,
}


def find(search: Search, name: str, evaluations: int, seed: int) -> SearchResult:
    """Returns the best plan of the named search. Raises Infeasible if it finds none."""
    space = Space(search)
    counter = EvaluationCounter(evaluations)
    SEARCHES[name](space, counter, np.random.default_rng(seed))
    search_s = counter.since_begin_s
    if not counter.best:
        raise Infeasible(f"none of {counter.evaluations} plans is possible: {search.matmuls[0].name}")
    route = space.route(counter.best)
    return SearchResult(route, counter.evaluations, counter.history, counter.elapsed_s, search_s)
