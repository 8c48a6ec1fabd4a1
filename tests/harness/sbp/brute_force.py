"""Every route of a small chain: all strategies, all places, one item after the other, without bounds or prices.

A way is (source, target, seconds, bytes), a set of them has four columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harness.sbp.device_grid import Strategy
from harness.sbp.matmul_chain import Attention, Chain, Matmul, Residual
from harness.sbp.strategy_costs import Costs, returns


class Every:
    """All ways through the items of a chain."""

    def __init__(self, chain: Chain, costs: Costs, ends: str) -> None:
        self.chain, self.costs, self.ends = chain, costs, ends
        self.number = {place: k for k, place in enumerate(costs.places)}
        self.stay = np.array([(k, k, 0.0, 0.0) for k in self.number.values()])

    def routes(self, repeated: slice | None = None, period: int = 0) -> list[tuple[float, float]]:
        """(bytes, seconds) of all routes, but for some that take more than another one in both.

        Of the `repeated` items every `period` is equal.
        """
        items, tied = self.chain.items, bool(self.chain.matmuls[0].tied)
        inner = slice(1, len(items) - 1) if tied else slice(0, len(items))
        run = repeated or slice(inner.stop, inner.stop)
        ways = self.stay
        for k in range(inner.start, run.start):
            ways = self.then(ways, k, items[k], not tied)
        if run.start < run.stop:
            ways = self.blocks(ways, run, period, not tied)
        for k in range(run.stop, inner.stop):
            ways = self.then(ways, k, items[k], not tied)
        return self.tied(ways) if tied else self.closed(ways)

    def then(self, ways: np.ndarray, k: int, item: Matmul | Residual | Attention, whole: bool) -> np.ndarray:
        """A move, if it is not the first item, and the item."""
        free = k == 0 and self.ends == "free"
        ways = ways if k == 0 else joined(ways, self.moves(entering(item)))
        return joined(ways, self.through(item, whole, float(free)))

    def blocks(self, ways: np.ndarray, run: slice, period: int, whole: bool) -> np.ndarray:
        """The same way through every period: in the first one without what a free input costs."""
        items, times = self.chain.items[run], (run.stop - run.start) // period
        free = 1 / times if run.start == 0 and self.ends == "free" else 0.0
        once = joined(self.stay, self.through(items[0], whole, free))
        for item in items[1:period]:
            once = joined(joined(once, self.moves(entering(item))), self.through(item, whole, 0.0))
        back = self.costs.moving(entering(items[0]))
        all_ = once.copy()
        all_[:, 2:] *= times
        all_[:, 2] += (times - 1) * back[once[:, 1].astype(int), once[:, 0].astype(int)]
        return joined(ways if run.start == 0 else joined(ways, self.moves(entering(items[0]))), all_)

    def through(self, item: Matmul | Residual | Attention, whole: bool, free: float) -> np.ndarray:
        if isinstance(item, Attention):
            attended = self.costs.attended(item)
            return np.array([way for way in self.stay if np.isfinite(attended[int(way[0]), int(way[0])])])
        if isinstance(item, Residual):
            ways = self.stay
            for k, inner in enumerate(item.items):
                ways = ways if free and not k else joined(ways, self.moves(entering(inner)))
                ways = joined(ways, self.through(inner, False, 0.0 if k else free))
            past = self.costs.moving(item.elements)
            ways[:, 2] += past[ways[:, 0].astype(int), ways[:, 1].astype(int)]
            return ways
        return np.array(
            [way for strategy in self.costs.grid.strategies for way in self.by(item, strategy, whole, free)]
        )

    def by(self, item: Matmul, strategy: Strategy, whole: bool, free: float) -> list[tuple[int, int, float, float]]:
        costs = self.costs
        seconds = free * costs.matmul_seconds(item, strategy, True) + (1 - free) * costs.matmul_seconds(
            item, strategy, False
        )
        return [
            (self.number[enters], self.number[leaves], seconds, costs.held(item, strategy))
            for enters, undone in costs.comes_from(item, strategy)
            for leaves, split in costs.goes_to(item, strategy)
            if whole or returns(undone, split)
        ]

    def moves(self, elements: float) -> np.ndarray:
        seconds = self.costs.moving(elements)
        return np.array([(i, j, second, 0.0) for (i, j), second in np.ndenumerate(seconds)])

    def closed(self, ways: np.ndarray) -> list[tuple[float, float]]:
        """With what brings the input and the output to where they are wanted."""
        apart = [k for place, k in self.number.items() if place.rows == self.costs.grid.all]
        first, last = self.chain.matmuls[0], self.chain.matmuls[-1]
        source, target = ways[:, 0].astype(int), ways[:, 1].astype(int)
        seconds = ways[:, 2].copy()
        if self.ends == "batch_split":
            seconds += self.costs.moving(last.output_elements)[:, apart].min(1)[target]
            if not first.look_up:
                seconds += self.costs.moving(first.input_elements)[apart].min(0)[source]
        return list(zip(ways[:, 3].tolist(), seconds.tolist(), strict=True))

    def tied(self, ways: np.ndarray) -> list[tuple[float, float]]:
        """Between an embedding and a head with its weight, which begin and end where the ways do."""
        first, last, costs = self.chain.matmuls[0], self.chain.matmuls[-1], self.costs
        ways = joined(ways, self.moves(last.input_elements))
        ways, found = ways[ways[:, 0] == ways[:, 1]], []
        apart = [k for place, k in self.number.items() if place.rows == costs.grid.all]
        beyond = costs.moving(last.output_elements)[:, apart].min(1) * (self.ends == "batch_split")
        for strategy in costs.grid.strategies:
            turned = Strategy(strategy.p0, strategy.p2, strategy.p1)
            seconds = (
                costs.matmul_seconds(first, strategy, True) + costs.leaving(last, turned) + costs.entering(last, turned)
            )
            goes = {self.number[place] for place, _ in costs.goes_to(first, strategy)}
            end = min(beyond[self.number[place]] for place, _ in costs.goes_to(last, turned))
            for at in goes & {self.number[place] for place, _ in costs.comes_from(last, turned)}:
                mine = ways[ways[:, 0] == at]
                totals = mine[:, 2] + seconds + end
                found += zip((mine[:, 3] + costs.held(last, turned)).tolist(), totals.tolist(), strict=True)
        return found


def joined(ones: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Every way along one of these and one of the others, but none that takes more than another one in both."""
    found = []
    for place in np.unique(ones[:, 1]):
        left, right = ones[ones[:, 1] == place], others[others[:, 0] == place]
        i, j = np.repeat(np.arange(len(left)), len(right)), np.tile(np.arange(len(right)), len(left))
        found.append(np.stack([left[i, 0], right[j, 1], left[i, 2] + right[j, 2], left[i, 3] + right[j, 3]], axis=1))
    return thinned(np.concatenate(found))


def thinned(ways: np.ndarray) -> np.ndarray:
    """Those with less seconds than all that have no more bytes."""
    kept, last, best = [], (-1.0, -1.0), 0.0
    for k in np.lexsort((ways[:, 2], ways[:, 3], ways[:, 1], ways[:, 0])):
        between, seconds = (ways[k, 0], ways[k, 1]), ways[k, 2]
        if between != last or seconds < best:
            kept.append(k)
            last, best = between, seconds
    return ways[kept]


def entering(item: Matmul | Residual | Attention) -> int:
    return item.elements if isinstance(item, Residual) else item.input_elements


def least(routes: Sequence[tuple[float, float]], limit: float) -> float:
    """Seconds of the cheapest route within a limit of bytes."""
    return min(seconds for size, seconds in routes if size <= limit * (1 + 1e-12))
