"""The cheapest strategies of a chain, exactly: a shortest path from place to place.

    places  o--product--o--move--o--attention--o--move--o--product--o ...
            o \\         o        o             o        o           o
            o  '--------o        o             o        o           o

A product is a matrix over places: the cheapest strategy that comes from one and goes to another. A residual branch is
one, too: the shortest way through it, and what it takes to move what goes past it to where the branch ends. So are
blocks that are repeated alike (`harness.sbp.repeated`): so many times a block, and the moves between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

from harness.sbp.chain import Chain, Item, Matmul, Residual
from harness.sbp.costs import INFINITE, Costs
from harness.sbp.edges import Edges, of_product
from harness.sbp.grid import Strategy
from harness.sbp.matrix import Matrix, along, cheapest, stay, still
from harness.sbp.repeated import Part, Repeated, entering, folded, parts
from harness.sbp.route import Infeasible, Move, Route, Step, Steps

Ends = Literal["free", "batch_split"]


class Loop(NamedTuple):
    """Both ends of a chain whose first and last product have one weight; the places between which they stand."""

    head: Step
    tail: Step
    at: int
    to: int
    seconds: float
    bytes: float


class Section(NamedTuple):
    """A part, and how it stands in its chain.

    `whole`: outside of what has to come back, where blocks may come to lie in any order of the digits. `free`: the
    share of the times that it is done in which its input is there already and needs no gradient.
    """

    part: Part
    whole: bool
    free: float


@dataclass
class Search:
    """Finds the cheapest route. `given` fixes the strategies of some products, or of all.

    With `ends` "free" the model's input lies as its product wants it and needs no gradient, and its output stays as the
    last reduce-scatter leaves it; with "batch_split" both are split by samples alone, and have gradients. What is least
    is `scale` x seconds + `price` x bytes that a device holds (`Costs.held`). With `repeat` the longest run of equal
    blocks is split alike (`harness.sbp.repeated` says what that is); products of which `given` says different things
    are not equal, and the two that share a weight are in no block.
    """

    chain: Chain
    costs: Costs
    ends: Ends = "free"
    given: Mapping[str, Strategy] = field(default_factory=dict)
    scale: float = 1.0
    price: float = 0.0
    repeat: bool = False

    def __post_init__(self) -> None:
        self._known: dict[object, Matrix] = {}
        self._products: dict[object, Edges] = {}
        self._loops: list[Loop] = []
        self.matmuls = self.chain.matmuls

    def priced(self, price: float, scale: float = 1.0) -> Search:
        """The same search for the least of another sum."""
        found = replace(self, scale=scale, price=price)
        found._products, found._loops = self._products, self._loops
        return found

    def route(self) -> Route:
        """Raises Infeasible where no strategy of some product is allowed."""
        ways, end = [self.way(section) for section in self.sections()], self.end()
        way = self._tied(ways, end) if self.ties() else along(self.start(), [*ways, end])
        if not np.isfinite(way.seconds[0, 0]):
            raise Infeasible("no strategies of neighbours fit together")
        return Route(self.named(way.steps(0, 0)), float(way.seconds[0, 0]))

    def named(self, steps: Steps) -> tuple[Step | Move, ...]:
        """The steps of all products, each with its own: what is alike is searched once."""
        names = iter(self.matmuls)
        return tuple(step._replace(item=next(names)) if isinstance(step, Step) else step for step in steps)

    def sections(self) -> list[Section]:
        """What lies between start and end; between the two products that share a weight, if there are such."""
        tied, items = self.ties(), self.chain.items
        inner = items[1:-1] if tied else items
        row = parts(folded(inner, self.alike) if self.repeat else inner, first=not tied)
        if tied:
            row.append(entering(items[-1]))
        free = 0.0 if tied or self.ends != "free" else 1.0
        return [Section(part, not tied, 0.0 if number else free) for number, part in enumerate(row)]

    # -- the ends -------------------------------------------------------------------------------------------------

    def start(self) -> Matrix:
        """(1, places): what it takes to have the model's input at each place."""
        first = self.matmuls[0]
        if self.ends == "free" or first.look_up:
            return still(np.zeros((1, len(self.costs.places))))
        return along(self._batch_split(), [self._move(first.input_elements)])

    def end(self) -> Matrix:
        """(places, 1): what it takes to bring the output from each place to where it is wanted."""
        if self.ends == "free":
            return still(np.zeros((len(self.costs.places), 1)))
        there = still(self._batch_split().seconds.T)
        return along(self._move(self.matmuls[-1].output_elements), [there])

    def _batch_split(self) -> Matrix:
        """(1, places): where what is split by samples alone lies."""
        costs, samples = self.costs, self.matmuls[0].samples
        everywhere = [place.rows == costs.grid.all and costs.can_lie(place, samples, 1) for place in costs.places]
        return still(np.where(everywhere, 0.0, INFINITE)[None, :])

    # -- one part after the other ---------------------------------------------------------------------------------

    def way(self, section: Section) -> Matrix:
        part, _, free = section
        if isinstance(part, float | int):
            return self._move(part)
        key = self.key(section)
        if key not in self._known:
            if isinstance(part, Matmul):
                self._known[key] = cheapest(self.product(section), len(self.costs.places), self.scale, self.price)
            elif isinstance(part, Residual):
                self._known[key] = self._residual(part, free)
            elif isinstance(part, Repeated):
                self._known[key] = self._repeated(part, section)
            else:
                self._known[key] = still(self.costs.attended(part))
        return self._known[key]

    def key(self, section: Section) -> object:
        """Equal for sections that differ in names only."""
        part, whole, free = section
        return part if isinstance(part, float | int) else (self.alike(part), whole, free)

    def alike(self, item: Item | Repeated) -> object:
        """Equal for items that differ in their names only."""
        if isinstance(item, Residual):
            return (item.elements, *map(self.alike, item.items))
        if isinstance(item, Repeated):
            return ("repeated", item.times, *map(self.alike, item.items))
        if isinstance(item, Matmul):
            return item.nameless, self.given.get(item.name)
        return item

    def product(self, section: Section) -> Edges:
        """All ways through a product that are worth it for some price. Raises Infeasible where there are none."""
        key = self.key(section)
        if key not in self._products:
            item, whole, free = section
            assert isinstance(item, Matmul)
            self._products[key] = of_product(self.costs, item, self.strategies(item), whole, free)
        return self._products[key]

    def strategies(self, item: Matmul) -> list[Strategy]:
        return [self.given[item.name]] if item.name in self.given else self.costs.strategies(item)

    def _move(self, elements: float) -> Matrix:
        if elements not in self._known:
            self._known[elements] = Matrix(
                self.scale * self.costs.moving(elements), lambda i, j: self.moved(elements, i, j)
            )
        return self._known[elements]

    def moved(self, elements: float, i: int, j: int, past: bool = False) -> Steps:
        """The step from one place to another, if there is one."""
        places = self.costs.places
        return [Move(elements, places[i], places[j], past)] if i != j else []

    def _residual(self, item: Residual, free: float) -> Matrix:
        """From each place through the branch, while what it is added to moves from there to where the branch ends."""
        ways = [self.way(section) for section in branch(item, free)]
        through, past = along(stay(len(self.costs.places)), ways), self._move(item.elements)
        return Matrix(
            through.seconds + past.seconds,
            lambda i, j: through.steps(i, j) + self.moved(item.elements, i, j, past=True),
        )

    def _repeated(self, item: Repeated, section: Section) -> Matrix:
        """From where the first block is entered to where the last one is left."""
        ways = [self.way(inner) for inner in block(item, section)]
        through, between = along(stay(len(self.costs.places)), ways), self._move(entering(item))
        return Matrix(
            item.times * through.seconds + (item.times - 1) * between.seconds.T,
            lambda i, j: item.steps(through.steps(i, j), between.steps(j, i)),
        )

    # -- one weight at both ends ----------------------------------------------------------------------------------

    def ties(self) -> bool:
        """Whether the weight of the first product, a look-up, is the last one's, too."""
        first, last = self.matmuls[0], self.matmuls[-1]
        return first is not last and first.look_up and bool(first.tied) and first.tied == last.tied

    def _tied(self, ways: list[Matrix], end: Matrix) -> Matrix:
        """From the embedding's output to the head's input and back to where the former lies: one shard for both."""
        middle = along(stay(len(self.costs.places)), ways)
        best, found = INFINITE, None
        for loop in self.loops():
            total = self.scale * loop.seconds + self.price * loop.bytes + middle.seconds[loop.at, loop.at]
            total += end.seconds[loop.to, 0]
            if total < best:
                best, found = total, loop
        if found is None:
            raise Infeasible(f"{self.matmuls[0].name} and {self.matmuls[-1].name}, which have one weight")
        head, tail, at, to = found.head, found.tail, found.at, found.to
        return Matrix(np.array([[best]]), lambda i, j: [head, *middle.steps(at, at), tail, *end.steps(to, 0)])

    def loops(self) -> list[Loop]:
        if not self._loops:
            self._loops += self._turned()
        return self._loops

    def _turned(self) -> Iterator[Loop]:
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


def branch(item: Residual, free: float) -> list[Section]:
    """What is in a branch: all of it comes back."""
    row = parts(item.items, first=free > 0)
    return [Section(part, False, 0.0 if number else free) for number, part in enumerate(row)]


def block(item: Repeated, section: Section) -> list[Section]:
    """What is in one of the blocks, on the average of all: what is free in the first one is a share of that."""
    row = parts(item.items, first=True)
    return [section._replace(part=part, free=0.0 if n else section.free / item.times) for n, part in enumerate(row)]
