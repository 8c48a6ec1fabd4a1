"""The model as a sequence of units, what a cut does not go through: a block, a small module, a function between them.

A module is opened, its parts become units, if it is a container, if blocks that repeat are in it, or if it is large. A
block is one of several modules of a class that one module calls. It stays whole, unless it has a chain of blocks in it:

    stage (4 of them)     block -> block -> block       opened: one tensor goes from block to block
    block (12 of them)    x -> part -> part -> + x      whole: x passes its parts
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from harness.capture.graph import CONTAINERS, Graph
from harness.capture.structure import refs
from harness.capture.trace import Call, Item, Step, Uncapturable, used

LARGE = 0.1
"""The share of the model's cost above which a module that is no block is opened."""


@dataclass
class Unit:
    """Consecutive steps and modules. `uses` are tensors made before, or inputs; `held` weights and buffers. A constant
    one depends on sizes alone."""

    nodes: list[Item]
    block: bool
    call: Call | None
    cost: float
    flops: float
    uses: set[int] = field(default_factory=set)
    makes: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)
    constant: bool = False

    @property
    def pure(self) -> bool:
        """Whether nothing is lost without it if nobody uses what it makes."""
        return all(isinstance(node, Step) and not node.random and not node.mutated for node in self.nodes)


class Units:
    """Cuts a graph into units. `opened_blocks` are blocks that are opened all the same."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.total = graph.cost(graph.trace.top) or 1.0
        self.opened_blocks: set[int] = set()
        self._chains: dict[int, bool] = {}

    def sequence(self) -> list[Unit]:
        """All units in the order of execution, but those that nobody needs."""
        units = [self._unit(item, parent) for item, parent in self._items(self.graph.trace.top)]
        constants: set[int] = set()
        for unit in units:
            unit.constant = unit.constant and unit.uses <= constants
            constants |= unit.makes if unit.constant else set()
        return self._needed(units)

    def can_open(self, unit: Unit) -> bool:
        """Whether a unit is a module with several parts."""
        return unit.call is not None and len(unit.call.items) > 1 and self.graph.can_open(unit.call)

    def _items(self, call: Call) -> Iterator[tuple[Item, Call]]:
        for item in call.items:
            if isinstance(item, Call) and self._opens(item, call):
                yield from self._items(item)
            else:
                yield item, call

    def _opens(self, call: Call, parent: Call) -> bool:
        if call.opaque or call.differs or not call.items:
            return False
        if parent is self.graph.trace.top:
            return True
        if not self.graph.can_open(call):
            return False
        if id(call) in self.opened_blocks or isinstance(call.module, CONTAINERS):
            return True
        if self.is_block(call, parent):
            return self._has_chain(call)
        large = self.graph.cost(call) > LARGE * self.total and sum(isinstance(i, Call) for i in call.items) > 1
        return large or self._contains_chain(call)

    def is_block(self, call: Call, parent: Call) -> bool:
        """Whether it is one of several modules of a class that `parent`, or what holds that, calls."""
        return any(call in group for group in self._groups(self._around(parent)))

    def _around(self, call: Call) -> Call:
        """The module whose parts these are: containers belong to what calls them."""
        while isinstance(call.module, CONTAINERS) and id(call) in self._parents:
            call = self._parents[id(call)]
        return call

    @cached_property
    def _parents(self) -> dict[int, Call]:
        return dict(_children(self.graph.trace.top))

    def _parts(self, call: Call) -> Iterator[Call]:
        """The module calls in a module, those in containers in their place."""
        for item in call.items:
            if isinstance(item, Call):
                if isinstance(item.module, CONTAINERS):
                    yield from self._parts(item)
                else:
                    yield item

    def _groups(self, call: Call) -> list[list[Call]]:
        by_class: dict[type[nn.Module], list[Call]] = {}
        for part in self._parts(call):
            if any(True for _ in part.module.children()):
                by_class.setdefault(type(part.module), []).append(part)
        return [group for group in by_class.values() if len(group) > 1]

    def _contains_chain(self, call: Call) -> bool:
        return self._has_chain(call) or any(self._contains_chain(part) for part in self._parts(call))

    def _has_chain(self, call: Call) -> bool:
        """Whether blocks follow each other in it, with one tensor from block to block somewhere."""
        if id(call) not in self._chains:
            self._chains[id(call)] = any(
                all(self._feeds(a, b) for a, b in itertools.pairwise(group))
                and any(self._narrow(call, group, a, b) for a, b in itertools.pairwise(group))
                for group in self._groups(call)
            )
        return self._chains[id(call)]

    def _feeds(self, first: Call, second: Call) -> bool:
        """Whether what the second one uses depends on what the first one returns."""
        graph = self.graph
        reached = set(refs(first.result))
        for _, item in graph.leaf_range(graph.end[id(first)], graph.start[id(second)]):
            if used(item) & reached:
                reached |= {*refs(item.result), *(item.mutated if isinstance(item, Step) else ())}
        return any(graph.inside(place, second) for number in reached for place in graph.users[number])

    def _narrow(self, call: Call, group: list[Call], first: Call, second: Call) -> bool:
        """Whether at most one tensor goes from the first to the second one: masks, which several get, do not count."""
        graph, place = self.graph, self.graph.start[id(second)]
        count = 0
        for value in graph.values:
            made, users = graph.made_at(value.number), graph.users[value.number]
            if graph.is_held(value) or value.number in graph.constants or made >= place:
                continue
            own = graph.inside(made, call)
            later = any(user >= place and (own or graph.inside(user, call)) for user in users)
            takers = [each for each in group if any(graph.inside(user, each) for user in users)]
            count += later and len(takers) < 2
        return count <= 1

    def _unit(self, item: Item, parent: Call) -> Unit:
        graph = self.graph
        call = item if isinstance(item, Call) else None
        block = call is not None and self.is_block(call, parent)
        unit = Unit(graph.nodes(item), block, call, graph.cost(item), graph.flops(item), held=graph.held_by(item))
        for node in unit.nodes:
            given = used(node)
            _refuse_unseen(node, given, graph)
            unit.uses |= {n for n in given if not graph.is_held(graph.values[n])} - unit.makes
            unit.makes |= {n for n in refs(node.result) if graph.inside(graph.made_at(n), item)}
        pure = not any(step.random or step.mutated for step in _steps(item))
        unit.constant = pure and bool(unit.makes) and unit.makes | unit.uses <= graph.constants
        return unit

    def _needed(self, units: list[Unit]) -> list[Unit]:
        needed = set(self.graph.trace.outputs) | set(self.graph.trace.replaced.values())
        kept = []
        for unit in reversed(units):
            if not unit.pure or unit.makes & needed:
                kept.append(unit)
                needed |= unit.uses
        return kept[::-1]


def _children(call: Call) -> Iterator[tuple[int, Call]]:
    """The calls in a call, each id with what it is in."""
    for item in call.items:
        if isinstance(item, Call):
            yield id(item), call
            yield from _children(item)


def _steps(item: Item) -> Iterator[Step]:
    return item.steps() if isinstance(item, Call) else iter([item])


def _refuse_unseen(node: Item, given: set[int], graph: Graph) -> None:
    """Raises Uncapturable for a tensor that was made by something else than torch functions and modules."""
    for value in (graph.values[number] for number in given):
        if value.unknown:
            raise Uncapturable("a tensor is made by a function that is none of torch's", node.where)
