"""The cheapest strategies that fit into so many bytes, exactly: Pareto labels (seconds, bytes), cut off by bounds.

Pricing bytes turns the limit into a plain search; the best price gives a bound from below, and a route that fits one
from above. What is between them is searched label by label:

    labels of place i  --(seconds, bytes) of a strategy-->  labels of place j, less those that another one dominates,
                                                            less those that cannot end below the best route known
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from harness.sbp.chain import Item, Matmul, Residual
from harness.sbp.costs import INFINITE, returns
from harness.sbp.optimum import Infeasible, Move, Route, Search, Step, parts
from harness.sbp.traffic import messages

Steps = tuple[Step | Move, ...]
CLOSE = 1e-12
"""Share by which sums of floats may differ."""


class TooLarge(Infeasible):
    """Nothing fits; `least` bytes are needed."""

    def __init__(self, least: float) -> None:
        self.least = least
        super().__init__(f"at least {least:.0f} bytes are needed")


class Edge(NamedTuple):
    """A way through an item, from place to place."""

    source: int
    target: int
    seconds: float
    bytes: float
    steps: Steps


class Labels(NamedTuple):
    """Ways up to a place, one entry each: where, what it costs, and the way (of those before) and edge it came by."""

    place: np.ndarray
    seconds: np.ndarray
    bytes: np.ndarray
    before: np.ndarray
    edge: np.ndarray


def within(search: Search, limit: float) -> Route:
    """The cheapest route that holds at most `limit` bytes on a device (`Costs.held`). Raises TooLarge."""
    cheap, small = search.route(), replace(search, scale=0.0, price=1.0).route()
    if held(cheap, search) <= limit * (1 + CLOSE):
        return cheap
    if held(small, search) > limit * (1 + CLOSE):
        raise TooLarge(held(small, search))
    price, fits = _best_price(search, _true(cheap, search), _true(small, search), limit)
    return _Between(search, limit, price, fits).route()


def held(route: Route, search: Search) -> float:
    """Bytes on a device; of one weight at both ends once."""
    steps = [step for step in route.steps if isinstance(step, Step)]
    return sum(search.costs.held(step.item, step.strategy) for step in steps[search.ties() :])


def _true(route: Route, search: Search) -> Route:
    """With its seconds, whatever it was searched by."""
    costs = search.costs
    told = (m.times * costs.collectives.seconds(m.name, m.degree, m.size) for m in messages(route, costs))
    return Route(route.steps, sum(told))


def _best_price(search: Search, cheap: Route, small: Route, limit: float) -> tuple[float, Route]:
    """The price that bounds best, seconds a byte, and the best route that fits: between two routes, one of each kind.

    seconds |x cheap
            |   \\  price
            |      x  a route below the line is the next of its kind
            |         \\
            |   limit    x small
            +-----|---------- bytes
    """
    fits = small
    while True:
        more = held(cheap, search) - held(small, search)
        price = max(0.0, (small.seconds - cheap.seconds) / more)
        found = _true(replace(search, price=price).route(), search)
        line = cheap.seconds + price * held(cheap, search)
        if found.seconds + price * held(found, search) >= line * (1 - CLOSE):
            return price, fits
        if held(found, search) > limit * (1 + CLOSE):
            cheap = found
        else:
            small = found
            fits = min(fits, found, key=lambda route: route.seconds)


class _Between:
    """The search between the bounds."""

    def __init__(self, search: Search, limit: float, price: float, best: Route) -> None:
        self.search, self.limit, self.price, self.best = search, limit * (1 + CLOSE), price, best
        self.priced, self.small = replace(search, price=price), replace(search, scale=0.0, price=1.0)
        self.known: dict[object, Edges] = {}
        self.whole = not search.ties()
        if self.whole:
            self.parts, ends = parts(search.chain.items, first=True), search.end().seconds
        else:
            self.parts = [*parts(search.chain.items[1:-1], first=False), search.matmuls[-1].input_elements]
            ends = np.where(np.eye(len(search.costs.places), dtype=bool), 0.0, INFINITE)
        free = self.whole and search.ends == "free"
        self.edges = [self._edges(part, self.whole, free and not number) for number, part in enumerate(self.parts)]
        self.ends = ends
        self.ahead = [self._ahead(one, free) for one in (self.priced, self.small)]

    def route(self) -> Route:
        search, end = self.search, self.search.end()
        if self.whole:
            start = search.start()
            places = np.flatnonzero(np.isfinite(start.seconds[0]))
            found = self._follow(_labels(places, start.seconds[0, places], np.zeros(len(places))), 0)
            if found is not None:
                first, steps, last, seconds = found
                self._keep([*start.steps(0, first), *steps, *end.steps(last, 0)], seconds)
            return self.best
        for loop in sorted(search.loops(), key=lambda loop: loop.seconds + self.price * loop.bytes):
            seconds = loop.seconds + end.seconds[loop.to, 0]
            found = self._follow(_labels(np.array([loop.at]), np.array([seconds]), np.array([loop.bytes])), loop.at)
            if found is not None:
                _, steps, _, seconds = found
                self._keep([loop.head, *steps, loop.tail, *end.steps(loop.to, 0)], seconds)
        return self.best

    def _keep(self, steps: Sequence[Step | Move], seconds: float) -> None:
        """The best route so far, with the names of its products."""
        names = iter(self.search.matmuls)
        named = [step._replace(item=next(names)) if isinstance(step, Step) else step for step in steps]
        self.best = Route(tuple(named), seconds)

    def _follow(self, labels: Labels, end: int) -> tuple[int, list[Step | Move], int, float] | None:
        """Extend labels to the end: where the best way begins, its steps, where it ends, its seconds.

        None if no way is better than the best route.
        """
        history = [self._pruned(labels, 0, end)]
        for number, edges in enumerate(self.edges):
            if not len(history[-1].place):
                return None
            history.append(self._extended(history[-1], edges, number + 1, end))
        arrived = history[-1]
        seconds = arrived.seconds + self.ends[arrived.place, end]
        if not len(seconds) or seconds.min() >= self.best.seconds * (1 - CLOSE):
            return None
        at = int(seconds.argmin())
        last, steps = int(arrived.place[at]), []
        for edges, came in zip(reversed(self.edges), reversed(history[1:]), strict=True):
            steps.append(edges.edges[came.edge[at]].steps)
            at = int(came.before[at])
        flat = [step for part in reversed(steps) for step in part]
        return int(history[0].place[at]), flat, last, float(seconds.min())

    def _extended(self, labels: Labels, ways: Edges, number: int, end: int) -> Labels:
        """Every label by every edge from its place; less what is dominated or cannot be the best."""
        found = []
        for place in np.unique(labels.place):
            mine, on = np.flatnonzero(labels.place == place), ways.of(int(place))
            longer = Labels(
                np.tile(ways.target[on], len(mine)),
                (labels.seconds[mine, None] + ways.seconds[on]).ravel(),
                (labels.bytes[mine, None] + ways.bytes[on]).ravel(),
                np.repeat(mine, len(on)),
                np.tile(on, len(mine)),
            )
            found.append(self._pruned(longer, number, end))
        together = Labels(*(np.concatenate(column) for column in zip(*found, strict=True)))
        return _taken(together, _undominated(together.place, together.seconds, together.bytes))

    def _ahead(self, search: Search, free: bool) -> list[np.ndarray]:
        """What is still to come at least, from each place to each end, before each part and behind the last one."""
        found = [np.where(np.isfinite(self.ends), search.scale * np.nan_to_num(self.ends, posinf=0.0), INFINITE)]
        for number in reversed(range(len(self.parts))):
            seconds = search.way(self.parts[number], self.whole, free and not number).seconds
            found.append((seconds[:, :, None] + found[-1][None, :, :]).min(1))
        return found[::-1]

    def _pruned(self, labels: Labels, number: int, end: int) -> Labels:
        """Without those that cannot fit, or cannot end below the best route."""
        priced, small = (ahead[number][labels.place, end] for ahead in self.ahead)
        bound = self.best.seconds * (1 - CLOSE) + self.price * self.limit
        value = labels.seconds + self.price * labels.bytes + priced
        return _taken(labels, (labels.bytes + small <= self.limit) & (value < bound))

    def _edges(self, part: Item | float, whole: bool, free: bool) -> Edges:
        """Ways through one part, less those that another one between the same places dominates."""
        key = (part, whole) if isinstance(part, float | int) else (self.search.alike(part), whole, free)
        if key not in self.known:
            self.known[key] = Edges(_best_edges(self._made(part, whole, free)))
        return self.known[key]

    def _made(self, part: Item | float, whole: bool, free: bool) -> list[Edge]:
        if isinstance(part, Matmul):
            return self._product(part, whole, free)
        if isinstance(part, Residual):
            return self._residual(part, free)
        way = self.search.way(part, whole, free)
        found = np.argwhere(np.isfinite(way.seconds))
        return [Edge(int(i), int(j), float(way.seconds[i, j]), 0.0, tuple(way.steps(int(i), int(j)))) for i, j in found]

    def _product(self, item: Matmul, whole: bool, free: bool) -> list[Edge]:
        costs, number = self.search.costs, {place: i for i, place in enumerate(self.search.costs.places)}
        return [
            Edge(number[enters], number[leaves], costs.product(item, strategy, free), costs.held(item, strategy),
                 (Step(item, strategy, enters, leaves, free),))
            for strategy in self.search.strategies(item)
            for enters, undone in costs.comes_from(item, strategy)
            for leaves, split in costs.goes_to(item, strategy)
            if whole or returns(undone, split)
        ]  # fmt: skip

    def _residual(self, item: Residual, free: bool) -> list[Edge]:
        """Ways through the branch, from each place, with the move of what goes past it."""
        places = self.search.costs.places
        past = self.search.costs.moving(item.elements)
        edges = [Edge(i, i, 0.0, 0.0, ()) for i in range(len(places))]
        for number, part in enumerate(parts(item.items, first=free)):
            following: dict[int, list[Edge]] = {}
            for edge in self._edges(part, whole=False, free=free and number == 0).edges:
                following.setdefault(edge.source, []).append(edge)
            edges = _best_edges([
                Edge(one.source, other.target, one.seconds + other.seconds, one.bytes + other.bytes,
                     one.steps + other.steps)
                for one in edges for other in following.get(one.target, ())
            ])  # fmt: skip
        return [
            edge._replace(seconds=edge.seconds + float(past[edge.source, edge.target]), steps=edge.steps + (
                (Move(item.elements, places[edge.source], places[edge.target], past=True),)
                if edge.source != edge.target else ()))
            for edge in edges
        ]  # fmt: skip


class Edges:
    """Edges as columns."""

    def __init__(self, edges: list[Edge]) -> None:
        self.edges = edges
        self.source, self.target = (np.array([edge[k] for edge in edges], dtype=np.int64) for k in (0, 1))
        self.seconds, self.bytes = (np.array([edge[k] for edge in edges]) for k in (2, 3))

    def of(self, place: int) -> np.ndarray:
        """The numbers of those that begin at a place."""
        return np.flatnonzero(self.source == place)


def _labels(place: np.ndarray, seconds: np.ndarray, bytes_: np.ndarray) -> Labels:
    """Where ways begin."""
    none = np.zeros(len(place), dtype=np.int64)
    return Labels(place, seconds, bytes_, none, none)


def _taken(labels: Labels, which: np.ndarray) -> Labels:
    return Labels(*(column[which] for column in labels))


def _undominated(place: np.ndarray, seconds: np.ndarray, bytes_: np.ndarray) -> np.ndarray:
    """The numbers of the labels than which no other one at the same place is as good in both."""
    if not len(place):
        return np.zeros(0, dtype=np.int64)
    order = np.lexsort((seconds, bytes_, place))
    kept = []
    for one in np.split(order, np.flatnonzero(np.diff(place[order])) + 1):
        before = np.concatenate(([INFINITE], np.minimum.accumulate(seconds[one])[:-1]))
        kept.append(one[seconds[one] < before])
    return np.concatenate(kept)


def _best_edges(edges: list[Edge]) -> list[Edge]:
    """Between any two places the undominated ones."""
    kept: dict[tuple[int, int], list[Edge]] = {}
    for edge in sorted(edges, key=lambda one: (one.bytes, one.seconds)):
        known = kept.setdefault((edge.source, edge.target), [])
        if not known or edge.seconds < known[-1].seconds:
            known.append(edge)
    return [edge for known in kept.values() for edge in known]
