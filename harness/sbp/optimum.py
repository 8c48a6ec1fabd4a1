"""The cheapest strategies of a chain, exactly: a shortest path from place to place.

    places  o--product--o--move--o--attention--o--move--o--product--o ...
            o \\         o        o             o        o           o
            o  '--------o        o             o        o           o

A product is a matrix over places: the cheapest strategy that comes from one and goes to another. A residual branch is
one, too: the shortest way through it, and what it takes to move what goes past it to where the branch ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

from harness.sbp.chain import Chain, Item, Matmul, Residual
from harness.sbp.costs import INFINITE, Costs, Place, returns
from harness.sbp.grid import Strategy

Ends = Literal["free", "batch_split"]


class Step(NamedTuple):
    """A product, its strategy, and where its input and its output lie. A `free` input is there already."""

    item: Matmul
    strategy: Strategy
    enters: Place
    leaves: Place
    free: bool = False
    reduced: bool = True


class Move(NamedTuple):
    """An all-to-all of a tensor of a micro-batch; `past` a branch, at whose end it happens."""

    elements: float
    source: Place
    target: Place
    past: bool = False


@dataclass(frozen=True)
class Route:
    """All that happens, in order, and the seconds of communication of one training step."""

    steps: tuple[Step | Move, ...]
    seconds: float

    @property
    def strategies(self) -> dict[str, Strategy]:
        return {step.item.name: step.strategy for step in self.steps if isinstance(step, Step)}


class Infeasible(ValueError):
    """No strategy is allowed; says for which product."""


class Loop(NamedTuple):
    """Both ends of a chain whose first and last product have one weight; the places between which they stand."""

    head: Step
    tail: Step
    at: int
    to: int
    seconds: float
    bytes: float


class Matrix(NamedTuple):
    """Seconds from place to place, and the steps of products on each of these ways."""

    seconds: np.ndarray
    steps: Callable[[int, int], list[Step | Move]]


@dataclass
class Search:
    """Finds the cheapest route. `given` fixes the strategies of some products, or of all.

    With `ends` "free" the model's input lies as its product wants it and needs no gradient, and its output stays as the
    last reduce-scatter leaves it; with "batch_split" both are split by samples alone, and have gradients. What is least
    is `scale` x seconds + `price` x bytes that a device holds (`Costs.held`).
    """

    chain: Chain
    costs: Costs
    ends: Ends = "free"
    given: Mapping[str, Strategy] = field(default_factory=dict)
    scale: float = 1.0
    price: float = 0.0

    def __post_init__(self) -> None:
        self._known: dict[object, Matrix] = {}
        self.matmuls = self.chain.matmuls

    def route(self) -> Route:
        """Raises Infeasible where no strategy of some product is allowed."""
        start, end = self.start(), self.end()
        way = self._tied(end) if self.ties() else along(start, [*self.ways(self.chain.items, first=True), end])
        if not np.isfinite(way.seconds[0, 0]):
            raise Infeasible("no strategies of neighbours fit together")
        names = iter(self.matmuls)
        steps = [step._replace(item=next(names)) if isinstance(step, Step) else step for step in way.steps(0, 0)]
        return Route(tuple(steps), float(way.seconds[0, 0]))

    # -- the ends -------------------------------------------------------------------------------------------------

    def start(self) -> Matrix:
        """(1, places): what it takes to have the model's input at each place."""
        first = self.matmuls[0]
        if self.ends == "free" or first.look_up:
            return still(np.zeros((1, len(self.costs.places))))
        return along(self._batch_split(), [self.move(first.input_elements)])

    def end(self) -> Matrix:
        """(places, 1): what it takes to bring the output from each place to where it is wanted."""
        if self.ends == "free":
            return still(np.zeros((len(self.costs.places), 1)))
        there = still(self._batch_split().seconds.T)
        return along(self.move(self.matmuls[-1].output_elements), [there])

    def _batch_split(self) -> Matrix:
        """(1, places): where what is split by samples alone lies."""
        everywhere = [place.rows == self.costs.grid.all for place in self.costs.places]
        return still(np.where(everywhere, 0.0, INFINITE)[None, :])

    # -- one item after the other ---------------------------------------------------------------------------------

    def ways(self, items: Sequence[Item], first: bool = False, whole: bool = True) -> list[Matrix]:
        """A matrix for each item and each move before one; none before the `first` of all."""
        free = first and self.ends == "free"
        return [self.way(part, whole, free and not number) for number, part in enumerate(parts(items, first))]

    def way(self, part: Item | float, whole: bool, free: bool) -> Matrix:
        """Through an item, or with the move of so many elements."""
        return self.move(part) if isinstance(part, float | int) else self.item(part, whole, free)

    def move(self, elements: float) -> Matrix:
        if elements not in self._known:
            places = self.costs.places
            self._known[elements] = Matrix(
                self.scale * self.costs.moving(elements),
                lambda i, j: [Move(elements, places[i], places[j])] if i != j else [],
            )
        return self._known[elements]

    def item(self, item: Item, whole: bool, free: bool) -> Matrix:
        """`whole`: outside of what has to come back, where blocks may come to lie in any order of the digits."""
        key = (self.alike(item), whole, free)
        if key not in self._known:
            if isinstance(item, Matmul):
                self._known[key] = self._product(item, whole, free)
            elif isinstance(item, Residual):
                self._known[key] = self._residual(item, free)
            else:
                self._known[key] = still(self.costs.attended(item))
        return self._known[key]

    def alike(self, item: Item) -> object:
        """Equal for items that differ in their names only."""
        if isinstance(item, Residual):
            return (item.elements, *map(self.alike, item.items))
        if isinstance(item, Matmul):
            return replace(item, name=""), self.given.get(item.name)
        return item

    def _product(self, item: Matmul, whole: bool, free: bool) -> Matrix:
        costs, number = self.costs, {place: i for i, place in enumerate(self.costs.places)}
        seconds, chosen = np.full((len(number), len(number)), INFINITE), {}
        for strategy in self.strategies(item):
            cost = self._cost(item, strategy, free)
            for enters, undone in costs.comes_from(item, strategy):
                for leaves, split in costs.goes_to(item, strategy):
                    at = number[enters], number[leaves]
                    if cost < seconds[at] and (whole or returns(undone, split)):
                        seconds[at], chosen[at] = cost, Step(item, strategy, enters, leaves, free)
        if not chosen:
            raise Infeasible(item.name)
        return Matrix(seconds, lambda i, j: [chosen[i, j]])

    def _cost(self, item: Matmul, strategy: Strategy, free: bool) -> float:
        return self.scale * self.costs.product(item, strategy, free) + self.price * self.costs.held(item, strategy)

    def strategies(self, item: Matmul) -> list[Strategy]:
        return [self.given[item.name]] if item.name in self.given else self.costs.strategies(item)

    def _residual(self, item: Residual, free: bool) -> Matrix:
        """From each place through the branch, while what it is added to moves from there to where the branch ends."""
        n = len(self.costs.places)
        begin = still(np.where(np.eye(n, dtype=bool), 0.0, INFINITE))
        branch = along(begin, self.ways(item.items, first=free, whole=False))
        places = self.costs.places

        def steps(i: int, j: int) -> list[Step | Move]:
            past = Move(item.elements, places[i], places[j], past=True)
            return branch.steps(i, j) + ([past] if i != j else [])

        return Matrix(branch.seconds + self.move(item.elements).seconds, steps)

    # -- one weight at both ends ----------------------------------------------------------------------------------

    def ties(self) -> bool:
        """Whether the weight of the first product, a look-up, is the last one's, too."""
        first, last = self.matmuls[0], self.matmuls[-1]
        return first is not last and first.look_up and bool(first.tied) and first.tied == last.tied

    def _tied(self, end: Matrix) -> Matrix:
        """From the embedding's output to the head's input and back to where the former lies: one shard for both."""
        last = self.matmuls[-1]
        begin = still(np.where(np.eye(len(self.costs.places), dtype=bool), 0.0, INFINITE))
        middle = along(begin, [*self.ways(self.chain.items[1:-1], whole=False), self.move(last.input_elements)])
        best, found = INFINITE, None
        for loop in self.loops():
            total = self.scale * loop.seconds + self.price * loop.bytes + middle.seconds[loop.at, loop.at]
            total += end.seconds[loop.to, 0]
            if total < best:
                best, found = total, loop
        if found is None:
            raise Infeasible(f"{self.matmuls[0].name} and {last.name}, which have one weight")
        head, tail, at, to = found.head, found.tail, found.at, found.to
        return Matrix(np.array([[best]]), lambda i, j: [head, *middle.steps(at, at), tail, *end.steps(to, 0)])

    def loops(self) -> Iterator[Loop]:
        """All ways to split a weight that is the embedding's, and turned the head's.

        Where one has (p0, p1, p2) the other has (p0, p2, p1), and the head's input comes from where the embedding's
        output goes.
        """
        first, last, costs = self.matmuls[0], self.matmuls[-1], self.costs
        number, allowed = {place: i for i, place in enumerate(costs.places)}, set(self.strategies(last))
        for strategy in self.strategies(first):
            turned = Strategy(strategy.p0, strategy.p2, strategy.p1)
            if turned not in allowed:
                continue
            seconds = costs.product(first, strategy, True) + costs.product(last, turned, False)
            seconds -= costs.weights(last, turned)  # one all-reduce for both
            held = costs.held(last, turned)
            entered = {place for place, _ in costs.comes_from(last, turned)}
            for place, _ in costs.goes_to(first, strategy):
                for leaves, _ in costs.goes_to(last, turned) if place in entered else ():
                    head = Step(first, strategy, place, place, free=True, reduced=False)
                    tail = Step(last, turned, place, leaves)
                    yield Loop(head, tail, number[place], number[leaves], seconds, held)


def parts(items: Sequence[Item], first: bool) -> list[Item | float]:
    """Items, and before each of them the elements that are moved; not before the `first` of all."""
    found: list[Item | float] = []
    for number, item in enumerate(items):
        if number or not first:
            found.append(item.elements if isinstance(item, Residual) else item.input_elements)
        found.append(item)
    return found


def along(start: Matrix, ways: Sequence[Matrix]) -> Matrix:
    """The shortest ways from the start's rows through all `ways`, one after the other."""
    seconds, came = start.seconds, []
    for way in ways:
        sums = seconds[:, :, None] + way.seconds[None, :, :]
        came.append(sums.argmin(1))
        seconds = sums.min(1)

    def steps(i: int, j: int) -> list[Step | Move]:
        found: list[list[Step | Move]] = []
        for way, source in zip(reversed(ways), reversed(came), strict=True):
            k = int(source[i, j])
            found.append(way.steps(k, j))
            j = k
        found.append(start.steps(i, j))
        return [step for part in reversed(found) for step in part]

    return Matrix(seconds, steps)


def still(seconds: np.ndarray) -> Matrix:
    """A way without products."""
    return Matrix(seconds, lambda i, j: [])
