"""Where a sequence of units is cut into layers: where few bytes are alive.

    units      embed  add  block  block  norm  slice  head
    bytes alive     8    4      4      4     4      1           between two units with weights or work, the fewest
    layers     embed, add | block | block | norm | slice, head

A cut is left out where a much narrower one is near, unless a block begins or ends there. It is not possible

* between a change in place and the making of another tensor of the same memory,
* between two uses of a buffer that changes, as those of a batch norm that is called twice,
* inside a loop of small steps over the same weights, as over the places of a text.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

from harness.capture.graph import Graph
from harness.capture.units import Unit, Units

WORK = 0.005
"""The share of the FLOPs of all matmuls from which on a unit can be a layer by itself, or WEIGHTS of their bytes..."""
WEIGHTS = 0.01
COST = 0.05
"""...or this share of the cost, of a unit without matmuls."""
NEAR = 0.03
"""The share of the cost within which a narrower cut replaces one..."""
NARROWER = 1.9
"""...that has so many times its bytes."""
LOOP = 3
"""Uses of a weight that make a loop, if from one to the next the model does less than NEAR of its work."""
UNBALANCED = 1.1
"""If the slower of two stages needs more than this times the mean, a large block is opened."""


@dataclass
class Layers:
    """Layers as lists of units; `alive[k]` are the bytes that pass from layer k to the next ones."""

    layers: list[list[Unit]]
    alive: list[int]


def cut(units: Units) -> Layers:
    """The layers of a model; blocks are opened as long as two stages could not be balanced otherwise."""
    while True:
        found = Cutter(units).layers()
        middle = _unbalanced(found.layers)
        large = [unit for unit in middle if units.can_open(unit)]
        if not large:
            return found
        units.opened_blocks.add(id(max(large, key=lambda unit: unit.cost).call))


def _unbalanced(layers: list[list[Unit]]) -> list[Unit]:
    """The units of the layer that holds the half of the work, if it keeps two stages from balance."""
    costs = [sum(unit.cost for unit in layer) for layer in layers]
    total, done = sum(costs), 0.0
    for layer, cost in zip(layers, costs, strict=True):
        if done + cost >= total / 2:
            slower = min(max(done, total - done), max(done + cost, total - done - cost))
            return layer if slower > UNBALANCED * total / 2 else []
        done += cost
    return []


class Cutter:
    """Chooses the cuts of one sequence of units. Constants are no part of it: they are made where they are used."""

    def __init__(self, units: Units) -> None:
        self.graph: Graph = units.graph
        sequence = units.sequence()
        self.units = [unit for unit in sequence if not unit.constant]
        self.constants = {number for unit in sequence if unit.constant for number in unit.makes}
        self.total = sum(unit.cost for unit in self.units) or 1.0
        self.flops = sum(unit.flops for unit in self.units) or 1.0
        values = self.graph.values
        self.weights = sum(value.bytes for value in values if value.trained) or 1
        self.alive = self._alive()

    def layers(self) -> Layers:
        places = self._places()
        ends = [*places, len(self.units)]
        starts = [0, *places]
        return Layers(
            [self.units[start:end] for start, end in zip(starts, ends, strict=True)],
            [self._bytes(place) for place in places],
        )

    def _alive(self) -> list[set[int]]:
        """For each place the tensors that pass it: made before unit k, or inputs, and used by it or later."""
        alive = set(self.graph.trace.outputs) - self.constants
        alive = {number for number in alive if not self.graph.is_held(self.graph.values[number])}
        found = []
        for unit in reversed(self.units):
            alive = (alive - unit.makes) | (unit.uses - self.constants)
            found.append(set(alive))
        return found[::-1]

    def _bytes(self, place: int) -> int:
        return sum(self.graph.values[number].bytes for number in self.alive[place])

    def _places(self) -> list[int]:
        """Unit k begins a layer for each k that is returned."""
        possible = [place for place in range(1, len(self.units)) if self._possible(place)]
        heavy = [k for k, unit in enumerate(self.units) if self._is_heavy(unit)]
        gaps = [[place for place in possible if first < place <= second] for first, second in itertools.pairwise(heavy)]
        chosen = [
            (min(reversed(gap), key=self._bytes), self._next_to_block(first, second))
            for gap, first, second in zip(gaps, heavy, heavy[1:], strict=False)
            if gap
        ]
        return [place for place, fixed in chosen if fixed or not self._replaced(place, [p for p, _ in chosen])]

    def _next_to_block(self, first: int, second: int) -> bool:
        return self.units[first].block or self.units[second].block

    def _is_heavy(self, unit: Unit) -> bool:
        values = [self.graph.values[number] for number in unit.held]
        weights = sum(value.bytes for value in values if value.trained)
        if unit.block or weights >= WEIGHTS * self.weights:
            return True
        return unit.flops >= WORK * self.flops or unit.cost >= COST * self.total

    def _replaced(self, place: int, others: list[int]) -> bool:
        """Whether a much narrower cut is near."""
        for other in others:
            low, high = sorted((place, other))
            between = sum(unit.cost for unit in self.units[low:high])
            if between <= NEAR * self.total and self._bytes(other) * NARROWER <= self._bytes(place):
                return True
        return False

    def _possible(self, place: int) -> bool:
        if not self.alive[place]:
            return False
        return not (self._parts_memory(place) or self._parts_buffer(place) or place in self._loops)

    def _parts_memory(self, place: int) -> bool:
        """Whether two tensors of one memory pass a place after which it is changed."""
        first = self._first_place(place)
        storages = [self.graph.values[number].storage for number in self.alive[place]]
        changes = self.graph.changed_storages
        return any(
            storages.count(storage) > 1 and any(change >= first for change in changes.get(storage, ()))
            for storage in storages
        )

    def _first_place(self, place: int) -> int:
        return self.graph.start[id(self.units[place].nodes[0])]

    def _parts_buffer(self, place: int) -> bool:
        """Whether a buffer that changes, or a view of it, is used on both sides of a place."""
        if any(self.graph.values[number].storage in self._changing_storages for number in self.alive[place]):
            return True
        return any(first < place <= last for first, last in self._changing)

    @cached_property
    def _changing_storages(self) -> set[int]:
        held = {self.graph.values[number].storage for unit in self.units for number in unit.held}
        return held & self.graph.changed_storages.keys()

    @cached_property
    def _changing(self) -> list[tuple[int, int]]:
        """The first and the last unit that use each buffer that changes."""
        users: dict[int, list[int]] = {}
        for k, unit in enumerate(self.units):
            for storage in {self.graph.values[number].storage for number in unit.held} & self._changing_storages:
                users.setdefault(storage, []).append(k)
        for state, number in self.graph.trace.replaced.items():
            storages = {value.storage for value in self.graph.values if value.source == state}
            makers = [k for k, unit in enumerate(self.units) if number in unit.makes]
            for storage in storages & users.keys():
                users[storage] = sorted({*users[storage], *makers})
        return [(places[0], places[-1]) for places in users.values()]

    @cached_property
    def _loops(self) -> set[int]:
        """Places between many uses of one weight, with little work from use to use."""
        found: set[int] = set()
        users: dict[int, list[int]] = {}
        for k, unit in enumerate(self.units):
            for number in unit.held:
                if self.graph.values[number].trained:
                    users.setdefault(number, []).append(k)
        for places in users.values():
            for run in self._runs(places):
                if len(run) >= LOOP:
                    found |= set(range(run[0] + 1, run[-1] + 1))
        return found

    def _runs(self, places: list[int]) -> list[list[int]]:
        runs = [[places[0]]]
        for before, place in itertools.pairwise(places):
            work = sum(unit.cost for unit in self.units[before:place])
            if work < NEAR * self.total:
                runs[-1].append(place)
            else:
                runs.append([place])
        return runs
