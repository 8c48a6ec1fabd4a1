"""The cheapest strategies of a chain, exactly: a shortest path from place to place.

    places  o--matmul--o--move--o--attention--o--move--o--matmul--o ...
            o \\         o        o             o        o           o
            o  '--------o        o             o        o           o

A matmul is a matrix over places (layouts): the cheapest strategy that takes its input from one and leaves its output in
another. A residual branch is a matrix, too: the shortest path through it, plus the move of the tensor that bypasses it
to where the branch ends. So are repeated blocks (`harness.sbp.repeated_layers`): each block and the moves between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

from harness.sbp.device_grid import Strategy
from harness.sbp.distance_matrix import Matrix, along, cheapest, stay, still
from harness.sbp.matmul_chain import Chain, Item, Matmul, OneWay, Residual, one_way
from harness.sbp.pareto_edges import Edges, matmul_edges
from harness.sbp.repeated_layers import Part, Repeated, entering, fold_repeats, parts
from harness.sbp.route import Infeasible, Move, Route, Step, Steps
from harness.sbp.strategy_costs import INFINITE, Costs

Ends = Literal["free", "batch_split"]


class Loop(NamedTuple):
    """Both ends of a chain whose first and last matmul share a weight: their steps, places, seconds and bytes held."""

    head: Step
    tail: Step
    at: int
    to: int
    seconds: float
    bytes: float


class Section(NamedTuple):
    """A part, and its role in its chain.

    `whole`: outside of branches that must return to their layout, so that blocks may end in any order of the digits.
    `free`: the share of its executions in which its input needs neither communication nor a gradient.
    """

    part: Part
    whole: bool
    free: float


@dataclass
class Search:
    """Finds the cheapest route. `fixed` are the strategies of some matmuls, or of all.

    With `ends` "free" the model's input has the layout of its matmul and needs no gradient, and its output stays as the
    last reduce-scatter leaves it; with "batch_split" both are split by samples alone, and have gradients. The search
    minimizes `scale` x seconds + `price` x bytes that a device holds (`Costs.held`). With `repeat` the longest run of
    equal blocks gets the same split (`harness.sbp.repeated_layers`); matmuls with different strategies in `fixed` are
    not equal, and the two that share a weight are in no block.
    """

    chain: Chain
    costs: Costs
    ends: Ends = "free"
    fixed: Mapping[str, Strategy] = field(default_factory=dict)
    scale: float = 1.0
    price: float = 0.0
    repeat: bool = False

    def __post_init__(self) -> None:
        self._cache: dict[object, Matrix] = {}
        self._matmuls: dict[object, Edges] = {}
        self._loops: list[Loop] = []
        self._best: dict[tuple[float, float], Route] = {}
        self.matmuls = self.chain.matmuls

    def priced(self, price: float, scale: float = 1.0) -> Search:
        """Returns the same search with another objective; results that do not depend on it are shared."""
        search = replace(self, scale=scale, price=price)
        search._matmuls, search._loops, search._best = self._matmuls, self._loops, self._best
        return search

    def best(self, price: float, scale: float = 1.0) -> Route:
        """Returns the cheapest route with another objective, which is searched once. Raises Infeasible as `route`."""
        if (price, scale) not in self._best:
            self._best[price, scale] = self.priced(price, scale).route()
        return self._best[price, scale]

    def route(self) -> Route:
        """Returns the cheapest route. Raises Infeasible where no strategy of some matmul is allowed."""
        sections, end = [self.shortest(section) for section in self.sections()], self.end()
        path = self._tied(sections, end) if self.ties() else along(self.start(), [*sections, end])
        if not np.isfinite(path.seconds[0, 0]):
            raise Infeasible("no strategies of neighbours fit together")
        return Route(self.named(path.steps(0, 0)), float(path.seconds[0, 0]))

    def named(self, steps: Steps) -> tuple[Step | Move, ...]:
        """Returns the steps with each matmul's own name: equal matmuls are searched once."""
        names = iter(self.matmuls)
        return tuple(step._replace(item=next(names)) if isinstance(step, Step) else step for step in steps)

    def sections(self) -> list[Section]:
        """Returns the sections between start and end; between the two matmuls that share a weight, if there are
        such."""
        tied, items = self.ties(), self.chain.items
        inner = items[1:-1] if tied else items
        row = parts(fold_repeats(inner, self.item_key) if self.repeat else inner, first=not tied)
        if tied:
            row.append(entering(items[-1]))
        free = 0.0 if tied or self.ends != "free" else 1.0
        return [Section(part, not tied, 0.0 if number else free) for number, part in enumerate(row)]

    # -- the ends -------------------------------------------------------------------------------------------------

    def start(self) -> Matrix:
        """Returns (1, places): the cost of bringing the model's input to each place."""
        first = self.matmuls[0]
        if self.ends == "free" or first.look_up:
            return still(np.zeros((1, len(self.costs.places))))
        return along(self._batch_split(), [self._move(one_way(first.input_elements, first.cut))])

    def end(self) -> Matrix:
        """Returns (places, 1): the cost of bringing the output from each place to its required layout."""
        if self.ends == "free":
            return still(np.zeros((len(self.costs.places), 1)))
        output = still(self._batch_split().seconds.T)
        return along(self._move(self.matmuls[-1].output_elements), [output])

    def _batch_split(self) -> Matrix:
        """Returns (1, places): 0 at the layout split by samples alone, else infinite."""
        costs, samples = self.costs, self.matmuls[0].samples
        everywhere = [place.rows == costs.grid.all and costs.can_be_placed(place, samples, 1) for place in costs.places]
        return still(np.where(everywhere, 0.0, INFINITE)[None, :])

    # -- one part after the other ---------------------------------------------------------------------------------

    def shortest(self, section: Section) -> Matrix:
        """Returns (places, places): the cheapest path through a section."""
        part, _, free = section
        if isinstance(part, float | int):
            return self._move(part)
        key = self.key(section)
        if key not in self._cache:
            if isinstance(part, Matmul):
                self._cache[key] = cheapest(self.matmul(section), len(self.costs.places), self.scale, self.price)
            elif isinstance(part, Residual):
                self._cache[key] = self._residual(part, free)
            elif isinstance(part, Repeated):
                self._cache[key] = self._repeated(part, section)
            else:
                self._cache[key] = still(self.costs.attended(part))
        return self._cache[key]

    def key(self, section: Section) -> object:
        """Returns a key that is equal for sections that differ in names only."""
        part, whole, free = section
        return part if isinstance(part, float | int) else (self.item_key(part), whole, free)

    def item_key(self, item: Item | Repeated) -> object:
        """Returns a key that is equal for items that differ in their names only."""
        if isinstance(item, Residual):
            return (item.elements, *map(self.item_key, item.items))
        if isinstance(item, Repeated):
            return ("repeated", item.times, *map(self.item_key, item.items))
        if isinstance(item, Matmul):
            return item.nameless, self.fixed.get(item.name)
        return item

    def matmul(self, section: Section) -> Edges:
        """Returns the Pareto-optimal edges through a matmul. Raises Infeasible if there are none."""
        key = self.key(section)
        if key not in self._matmuls:
            item, whole, free = section
            assert isinstance(item, Matmul)
            self._matmuls[key] = matmul_edges(self.costs, item, self.strategies(item), whole, free)
        return self._matmuls[key]

    def strategies(self, item: Matmul) -> list[Strategy]:
        return [self.fixed[item.name]] if item.name in self.fixed else self.costs.strategies(item)

    def _move(self, elements: float) -> Matrix:
        key = (elements, isinstance(elements, OneWay))
        if key not in self._cache:
            seconds = self.scale * self.costs.moving(elements)
            self._cache[key] = Matrix(seconds, lambda i, j: self.moved(elements, i, j))
        return self._cache[key]

    def moved(self, elements: float, i: int, j: int, past: bool = False) -> Steps:
        """Returns the move from one place to another; no step for the same place."""
        places = self.costs.places
        return [Move(elements, places[i], places[j], past)] if i != j else []

    def _residual(self, item: Residual, free: float) -> Matrix:
        """Returns paths through the branch, plus the move of the tensor that its output is added to."""
        sections = [self.shortest(section) for section in branch(item, free)]
        elements = entering(item)
        through, past = along(stay(len(self.costs.places)), sections), self._move(elements)
        return Matrix(
            through.seconds + past.seconds,
            lambda i, j: through.steps(i, j) + self.moved(elements, i, j, past=True),
        )

    def _repeated(self, item: Repeated, section: Section) -> Matrix:
        """Returns paths from where the first block is entered to where the last one is left."""
        sections = [self.shortest(inner) for inner in block(item, section)]
        through, between = along(stay(len(self.costs.places)), sections), self._move(entering(item))
        return Matrix(
            item.times * through.seconds + (item.times - 1) * between.seconds.T,
            lambda i, j: item.steps(through.steps(i, j), between.steps(j, i)),
        )

    # -- one weight at both ends ----------------------------------------------------------------------------------

    def ties(self) -> bool:
        """Returns whether the first matmul, a look-up, and the last one share a weight."""
        first, last = self.matmuls[0], self.matmuls[-1]
        return first is not last and first.look_up and bool(first.tied) and first.tied == last.tied

    def _tied(self, sections: list[Matrix], end: Matrix) -> Matrix:
        """Returns the cheapest path in which embedding and head have the same shard of their weight.

        It goes from the embedding's output to the head's input, which must have the same layout.
        """
        middle = along(stay(len(self.costs.places)), sections)
        best, cheapest_loop = INFINITE, None
        for loop in self.loops():
            total = self.scale * loop.seconds + self.price * loop.bytes + middle.seconds[loop.at, loop.at]
            total += end.seconds[loop.to, 0]
            if total < best:
                best, cheapest_loop = total, loop
        if cheapest_loop is None:
            first, last = self.matmuls[0].name, self.matmuls[-1].name
            raise Infeasible(f"{first} and {last}, which have one weight", first, last)
        head, tail, at, to = cheapest_loop.head, cheapest_loop.tail, cheapest_loop.at, cheapest_loop.to
        return Matrix(np.array([[best]]), lambda i, j: [head, *middle.steps(at, at), tail, *end.steps(to, 0)])

    def loops(self) -> list[Loop]:
        if not self._loops:
            self._loops += self._transposed_splits()
        return self._loops

    def _transposed_splits(self) -> Iterator[Loop]:
        """Yields all splits of a weight that is the embedding's and, transposed, the head's.

        Where one has (p0, p1, p2) the other has (p0, p2, p1), and the head takes its input from the layout of the
        embedding's output.
        """
        first, last, costs = self.matmuls[0], self.matmuls[-1], self.costs
        index, allowed = {place: i for i, place in enumerate(costs.places)}, set(self.strategies(last))
        for strategy in self.strategies(first):
            transposed = Strategy(strategy.p0, strategy.p2, strategy.p1)
            if transposed not in allowed:
                continue
            seconds = costs.matmul_seconds(first, strategy, True) + costs.matmul_seconds(last, transposed, False)
            seconds -= costs.weights(last, transposed)  # one all-reduce for both
            held = costs.held(last, transposed)
            entered = {place for place, _ in costs.comes_from(last, transposed)}
            for place, _ in costs.goes_to(first, strategy):
                for leaves, _ in costs.goes_to(last, transposed) if place in entered else ():
                    head = Step(first, strategy, place, place, free=True, reduced=False)
                    tail = Step(last, transposed, place, leaves)
                    yield Loop(head, tail, index[place], index[leaves], seconds, held)


def branch(item: Residual, free: float) -> list[Section]:
    """Returns the sections of a branch, which must return to its layout."""
    row = parts(item.items, first=free > 0)
    return [Section(part, False, 0.0 if number else free) for number, part in enumerate(row)]


def block(item: Repeated, section: Section) -> list[Section]:
    """Returns the sections of one block, averaged over all blocks: an input free in the first one is free in a
    share."""
    row = parts(item.items, first=True)
    return [section._replace(part=part, free=0.0 if n else section.free / item.times) for n, part in enumerate(row)]
