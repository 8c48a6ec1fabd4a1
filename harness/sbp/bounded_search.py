"""The search for the cheapest route within a limit of bytes: label setting between a lower and an upper bound.

    labels of place i  --(seconds, bytes) of an edge-->  labels of place j, without dominated ones and without those
                                                         that cannot end below the upper bound

A label is a path up to a place, as columns of integers, so that sums do not depend on the order of additions. With a
price for each byte the cheapest path gives a lower bound of what remains: seconds + price x (bytes - limit). The upper
bound is guessed, small at first; where nothing is found it is widened. Seconds are counted in units of 2**-48 of a
known route, bytes in about such units of the limit. The result is optimal up to a share of CLOSE.

The search goes through a chain section by section:

    ... o--part--o--[E--part x n--o--part x n--F]--back x (n - 1)--F--part--o ...

Repeated blocks are passed once, each part of them counted as often as there are blocks; then, for each pair of
successive blocks, the move of the stream from where a block is left to where it was entered. The place of entry,
`entered`, is fixed beforehand, one place after the other; without repeated blocks it has no effect.
"""

from __future__ import annotations

from dataclasses import replace
from math import frexp
from typing import NamedTuple

import numpy as np

from harness.sbp.pareto import pareto_optimal
from harness.sbp.pareto_edges import Edges
from harness.sbp.pareto_sections import ParetoSections
from harness.sbp.repeated_layers import Repeated, entering
from harness.sbp.route import Route, Steps
from harness.sbp.shortest_path import Search, Section, block
from harness.sbp.strategy_costs import INFINITE

CLOSE = 1e-11
"""Share by which sums of rounded numbers may differ."""
FINE = 48
"""Bits of the seconds of a known route, and of the limit."""
PRICES = (1.0, 0.95, 1.05)
"""Prices of the bounds, as shares of the best one: its neighbours bound paths with too few or too many bytes so far."""
FIRST, WIDER = 2.0**-14, 4
"""The first guess as a share of the gap between the bounds; by how much the next guess widens it."""


class Endpoints(NamedTuple):
    """Identifies the paths with the same `end` that enter the repeated blocks, if there are any, in the same place."""

    entered: int
    end: int


class BoundedSearch:
    """Searches paths from the labels of `starts`, one set for each end, to `ends`, the seconds added there (places,
    ends).

    If the first and the last matmul share a weight, an end is the place from which the middle leaves and to which it
    returns; else there is one end. `best` is a route within the limit. The best price gives the tightest bound.
    """

    def __init__(self, search: Search, limit: float, price: float, best: Route) -> None:
        self.search, self.best = search, best
        self.second, self.byte = best.seconds * 2.0**-FINE, 2.0 ** (frexp(limit)[1] - 1 - FINE)
        self.limit, self.rate = limit / self.byte * (1 + CLOSE), price * self.byte / self.second
        self.loops, end = search.loops() if search.ties() else [], search.end().seconds
        places = np.arange(len(end))
        if self.loops:
            self.ends = np.where(places[:, None] == places, 0.0, INFINITE)
            self.starts = [self._loop_labels(int(place), end) for place in places]
        else:
            self.ends = end
            self.starts = [self._labels(places, search.start().seconds[0], np.zeros(len(places)), places)]
        self.stages = CountedSections(search)
        self.ahead = [LowerBounds(self.stages, self.ends, share * price, 1.0, self.second) for share in PRICES]
        self.small = LowerBounds(self.stages, self.ends, 1.0, 0.0, self.byte)
        self.frontier, self.around = ParetoSections(search, price), self._cost_around()

    def route(self) -> Route:
        """Returns the cheapest route within the limit."""
        endpoints = sorted(
            (self._least(labels, Endpoints(entered, end)), Endpoints(entered, end))
            for entered in self.stages.entrances
            for end, labels in enumerate(self.starts)
        )
        below = endpoints[0][0] - self.rate * self.limit
        gap = FIRST * (self._above() - below)
        while True:
            bound = below + gap if below + 2 * gap < self._above() else self._above()
            edges = self._edges_below(bound)
            for least, endpoint in endpoints:
                if least - self.rate * self.limit < min(bound, self._above()):
                    self._search_from(endpoint, self._with_moves(edges, endpoint.entered), min(bound, self._above()))
            if self._above() <= bound:
                return self.best
            gap *= WIDER

    def _least(self, labels: Labels, endpoint: Endpoints) -> float:
        """Returns seconds plus the price of all bytes, in units, of the cheapest route with these endpoints."""
        ahead = self.ahead[0].before(endpoint.entered)[0][labels.place, endpoint.end]
        return float((labels.seconds + self.rate * labels.bytes + ahead).min(initial=INFINITE))

    def _above(self) -> float:
        """Returns the seconds of the best route, in units, less rounding."""
        return self.best.seconds / self.second * (1 - CLOSE)

    # -- in units -------------------------------------------------------------------------------------------------

    def _cost_around(self) -> list[np.ndarray]:
        """Returns (places, places) for each section: the least cost of a route through each pair, without the
        section."""
        begun = np.full(self.ends.shape, INFINITE)
        for end, labels in enumerate(self.starts):
            np.minimum.at(begun[:, end], labels.place, labels.seconds + self.rate * labels.bytes)
        return self.ahead[0].around(begun)

    def _edges_below(self, bound: float) -> list[Edges]:
        """Returns for each section the edges by which a route may end below the bound, multiplied by its count."""
        sections, counts = self.stages.sections, self.stages.times
        keys = [(self.search.key(section), times) for section, times in zip(sections, counts, strict=True)]
        least, edges = dict[object, np.ndarray](), dict[object, Edges]()
        for key, cost_around in zip(keys, self.around, strict=True):
            least[key] = np.minimum(least.get(key, INFINITE), cost_around)
        for key, section, times in zip(keys, sections, counts, strict=True):
            if key not in edges:
                room = (bound + self.rate * self.limit - least[key]) * self.second / times
                edges[key] = self._edges(self.frontier.edges(section, room), times)
        return [edges[key] for key in keys]

    def _edges(self, edges: Edges, times: int = 1) -> Edges:
        seconds, bytes_, kept = self._units(times * edges.seconds, times * edges.bytes)
        return replace(edges.taken(kept), seconds=seconds, bytes=bytes_)

    def _labels(self, place: np.ndarray, seconds: np.ndarray, bytes_: np.ndarray, number: np.ndarray) -> Labels:
        """Makes labels of paths that begin here, each with a number instead of its last edge."""
        seconds, bytes_, kept = self._units(seconds, bytes_)
        return Labels(place[kept], seconds, bytes_, number[kept], number[kept])

    def _units(self, seconds: np.ndarray, bytes_: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rounds to integer units, without those too large for any route; returns also the indices of the others."""
        kept = np.flatnonzero((seconds <= self.best.seconds) & (bytes_ <= self.limit * self.byte))
        seconds, bytes_ = np.rint(seconds[kept] / self.second), np.rint(bytes_[kept] / self.byte)
        return seconds.astype(np.int64), bytes_.astype(np.int64), kept

    def _loop_labels(self, place: int, end: np.ndarray) -> Labels:
        """Makes labels of the loops that begin at a place, with the seconds after them."""
        loops = [(number, loop) for number, loop in enumerate(self.loops) if loop.at == place]
        seconds = np.array([loop.seconds + end[loop.to, 0] for _, loop in loops])
        numbers = np.array([number for number, _ in loops], dtype=np.int64)
        return self._labels(np.full(len(loops), place), seconds, np.array([loop.bytes for _, loop in loops]), numbers)

    # -- one part after the other ---------------------------------------------------------------------------------

    def _search_from(self, endpoint: Endpoints, stages: list[Edges], bound: float) -> None:
        """Updates `best` with the best path with these endpoints that takes less than the bound, or one that fits."""
        labels = first = self._without_bounded(self.starts[endpoint.end], 0, endpoint, bound)
        history: list[tuple[np.ndarray, np.ndarray]] = []
        for number, edges in enumerate(stages, start=1):
            if not len(labels.place):
                return
            labels = self._without_bounded(
                labels.along(edges, self._useful_edges(labels, edges, number, endpoint, bound)), number, endpoint, bound
            )
            history.append((labels.before.astype(np.int32), labels.edge.astype(np.int32)))
        seconds = labels.seconds * self.second + self.ends[labels.place, endpoint.end]
        if seconds.min(initial=INFINITE) >= self.best.seconds:
            return
        at = int(seconds.argmin())
        last, total, steps = int(labels.place[at]), float(seconds[at]), list[Steps]()
        for edges, (before, edge) in zip(reversed(stages), reversed(history), strict=True):
            steps.append(edges.steps(int(edge[at])))
            at = int(before[at])
        between = self.stages.expand(steps[::-1])
        self.best = Route(self.search.named(self._with_ends(int(first.edge[at]), between, last)), total)

    def _with_moves(self, edges: list[Edges], entered: int) -> list[Edges]:
        """Adds the moves between repeated blocks, after one of them."""
        end = self.stages.end
        return [*edges[:end], self._edges(self.stages.back(entered)), *edges[end:]] if end else edges

    def _with_ends(self, begun: int, steps: Steps, last: int) -> Steps:
        """Adds the steps before and after: the loop of this number, or the moves of the input and the output."""
        start, end = self.search.start(), self.search.end()
        if self.loops:
            loop = self.loops[begun]
            return [loop.head, *steps, loop.tail, *end.steps(loop.to, 0)]
        return [*start.steps(0, begun), *steps, *end.steps(last, 0)]

    def _useful_edges(self, labels: Labels, edges: Edges, number: int, endpoint: Endpoints, bound: float) -> np.ndarray:
        """Returns the indices of the edges of a section by which some label may end below the bound."""
        least = np.full(len(self.ends), INFINITE)
        np.minimum.at(least, labels.place, labels.seconds + self.rate * labels.bytes)
        ahead = self.ahead[0].before(endpoint.entered)[number][edges.target, endpoint.end]
        through = least[edges.source] + edges.seconds + self.rate * edges.bytes + ahead
        return np.flatnonzero(through < bound + self.rate * self.limit)

    def _without_bounded(self, labels: Labels, number: int, endpoint: Endpoints, bound: float) -> Labels:
        """Removes labels that cannot fit the limit, or cannot end below the bound."""
        small = self.small.before(endpoint.entered)[number][labels.place, endpoint.end]
        good = labels.bytes + small <= self.limit
        for share, ahead in zip(PRICES, self.ahead, strict=True):
            rate = share * self.rate
            total = (
                labels.seconds
                + rate * labels.bytes
                + ahead.before(endpoint.entered)[number][labels.place, endpoint.end]
            )
            good &= total < bound + rate * self.limit
        return labels.taken(good)


BITS = 51
"""Seconds and bytes of a path are below 2**BITS units."""


class Labels(NamedTuple):
    """One entry for each path: its place (sorted), seconds and bytes, and the previous label and edge it came from."""

    place: np.ndarray
    seconds: np.ndarray
    bytes: np.ndarray
    before: np.ndarray
    edge: np.ndarray

    def taken(self, which: np.ndarray) -> Labels:
        return Labels(*(column[which] for column in self))

    def along(self, edges: Edges, which: np.ndarray) -> Labels:
        """Extends every label by each of these edges from its place, without dominated ones. The edges are sorted.

        place 0  l l l   x   e e e e      a block of sums, all of one edge adjacent
        place 2  l l     x   e e          another one
        """
        places = np.unique(self.place)
        label_range, edge_range = (
            np.searchsorted(at, [places, places + 1]) for at in (self.place, edges.source[which])
        )
        keys = (edges.target[which] << BITS) + edges.bytes[which]
        columns = (self.bytes, keys), (self.seconds, edges.seconds[which])
        key, seconds = (
            np.concatenate(
                [
                    np.add.outer(right[c:d], left[a:b]).ravel()
                    for a, b, c, d in zip(*label_range, *edge_range, strict=True)
                ]
            )
            for left, right in columns
        )
        kept = pareto_optimal(key, seconds, BITS)
        count = label_range[1] - label_range[0]
        begin = np.cumsum(count * (edge_range[1] - edge_range[0])) - count * (edge_range[1] - edge_range[0])
        block = np.searchsorted(begin, kept, "right") - 1
        edge, path = np.divmod(kept - begin[block], count[block])
        before, edge = label_range[0][block] + path, which[edge_range[0][block] + edge]
        return Labels(edges.target[edge], seconds[kept], self.bytes[before] + edges.bytes[edge], before, edge)


class CountedSections:
    """The `sections` of a search, each with its count `times`; those of the repeated blocks are `begin` to `end`."""

    def __init__(self, search: Search) -> None:
        self.search, self.run, self.begin, self.end = search, Repeated((), 1), 0, 0
        self.sections: list[Section] = []
        self.times: list[int] = []
        for section in search.sections():
            if isinstance(section.part, Repeated):
                self.run, self.begin = section.part, len(self.sections)
                self._add(block(section.part, section), section.part.times)
                self.end = len(self.sections)
            else:
                self._add([section], 1)
        self.places = np.arange(len(search.costs.places))

    def _add(self, sections: list[Section], times: int) -> None:
        self.sections += sections
        self.times += [times] * len(sections)

    @property
    def entrances(self) -> list[int]:
        """All places in which the repeated blocks can be entered; one if there are none."""
        return list(range(len(self.places) if self.end else 1))

    def back(self, entered: int) -> Edges:
        """Returns the edges of the moves between the blocks, all of them together."""
        elements, search = entering(self.run), self.search
        seconds = (self.run.times - 1) * search.costs.moving(elements)[:, entered]
        steps = search.moved
        return Edges(self.places, self.places, seconds, 0 * seconds, lambda k: steps(elements, k, entered))

    def expand(self, steps: list[Steps]) -> Steps:
        """Expands the steps in one block, and after it, to those of all blocks."""
        if self.end:
            inside = [step for part in steps[self.begin : self.end] for step in part]
            steps = [*steps[: self.begin], self.run.steps(inside, steps[self.end]), *steps[self.end + 1 :]]
        return [step for part in steps for step in part]


class LowerBounds:
    """Lower bounds of `scale` x seconds + `price` x bytes from each place to each of the `ends` (places, ends)."""

    def __init__(self, stages: CountedSections, ends: np.ndarray, price: float, scale: float, unit: float) -> None:
        search = stages.search.priced(price, scale)
        self.stages, self.scale, self.unit, self.ends = stages, scale, unit, ends
        self.costs = [
            search.shortest(section).seconds * n for section, n in zip(stages.sections, stages.times, strict=True)
        ]
        self._cache: dict[int, list[np.ndarray]] = {}

    def before(self, entered: int) -> list[np.ndarray]:
        """Returns (places, ends) before each section and after the last one."""
        if entered not in self._cache:
            self._cache[entered] = self._compute(entered)
        return self._cache[entered]

    def _compute(self, entered: int) -> list[np.ndarray]:
        stages = self.stages
        bounds = [np.where(np.isfinite(self.ends), self.scale * np.nan_to_num(self.ends, posinf=0.0), INFINITE)]
        for number in reversed(range(len(self.costs))):
            if number + 1 == stages.end:
                bounds.append(bounds[-1] + self.scale * stages.back(entered).seconds[:, None])
            bounds.append((self.costs[number][:, :, None] + bounds[-1][None, :, :]).min(1))
            if stages.end and number == stages.begin:
                bounds[-1][stages.places != entered] = INFINITE
        return [least / self.unit for least in reversed(bounds)]

    def around(self, begun: np.ndarray) -> list[np.ndarray]:
        """Returns (places, places) for each section: the least cost of all other sections.

        `begun` (places, ends) is the cost before the first section."""
        stages = self.stages
        around = [np.full(cost.shape, INFINITE) for cost in self.costs]
        for entered in stages.entrances:
            cost_here, ahead = begun, iter(self.before(entered)[1:])
            for number, cost in enumerate(self.costs):
                if stages.end and number == stages.begin:
                    cost_here = np.where(stages.places[:, None] == entered, cost_here, INFINITE)
                np.minimum(around[number], (cost_here[:, None, :] + next(ahead)[None, :, :]).min(2), out=around[number])
                cost_here = (cost_here[:, None, :] + cost[:, :, None] / self.unit).min(0)
                if number + 1 == stages.end:
                    cost_here = cost_here + self.scale * stages.back(entered).seconds[:, None] / self.unit
                    next(ahead)
        return around
