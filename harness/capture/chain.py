"""From layers as lists of units to a chain: what each layer takes and gives, and which tensors jump over layers.

    layer 0   layer 1   layer 2   layer 3        h, made by layer 0, used by 1 and 3
       h --tuple--> h --stash--------> pop       to the next layer in the value that layers pass, else as a skip

Constants, tensors that depend on sizes alone, are made in the first layer that uses them. From there small ones pass
on like others; large ones, and masks, each layer makes itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from harness.capture.agreement import Samples, Scaled
from harness.capture.cuts import Layers
from harness.capture.graph import Graph
from harness.capture.structure import leaves
from harness.capture.trace import Call, Item, State, used
from harness.capture.units import Unit

SMALL = 8
"""A constant is passed on if it has at most this fraction of the bytes that pass anyway."""


@dataclass
class Part:
    """One layer: what it executes, and the tensors (by number) that it takes and gives.

    `takes` and `gives` are what passes from layer to layer, `pops` and `stashes` map names of skips to tensors.
    `assigns` are buffers and attributes that hold another tensor afterwards.
    """

    nodes: list[Item] = field(default_factory=list)
    takes: list[int] = field(default_factory=list)
    gives: list[int] = field(default_factory=list)
    pops: dict[str, int] = field(default_factory=dict)
    stashes: dict[str, int] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)
    assigns: list[tuple[State, int]] = field(default_factory=list)

    def arrives(self) -> list[int]:
        """All tensors that come from earlier layers."""
        return [*self.takes, *self.pops.values()]


class Linear:
    """Makes the parts of a chain from layers."""

    def __init__(self, graph: Graph, layers: Layers, constants: list[Unit]) -> None:
        self.graph, self.layers = graph, layers
        self.makers = {number: unit for unit in constants for number in unit.makes}
        self.order = {id(unit): place for place, unit in enumerate(constants)}
        self.first: dict[int, int] = {}  # the layer that makes a tensor; layer 0 takes the inputs
        self.users: dict[int, list[int]] = {}

    def parts(self) -> list[Part]:
        """The layers in order, connected."""
        for number in self.graph.trace.inputs:
            self.first[number] = 0
            self.users[number] = []
        parts = [self._part(index, layer) for index, layer in enumerate(self.layers.layers)]
        for number in self.graph.trace.outputs:
            self._use(number, len(parts) - 1)
        self._keep_connected(len(parts))
        self._connect(parts)
        return parts

    def _part(self, index: int, layer: list[Unit]) -> Part:
        outputs = set(self.graph.trace.outputs) if index == len(self.layers.layers) - 1 else set()
        needed = set().union(*(unit.uses for unit in layer)) | outputs
        units = [*self._constants(index, needed), *layer]
        part = Part([node for unit in units for node in unit.nodes])
        part.held = set().union(*(unit.held for unit in units))
        for number in outputs:
            if self.graph.is_held(self.graph.values[number]):
                part.held.add(number)
        for unit in units:
            for number in unit.makes:
                self.first.setdefault(number, index)
                self.users.setdefault(number, [])
        own = set().union(*(unit.makes for unit in units))
        for number in (needed - own) | self._referred(part, index):
            self._use(number, index)
        return part

    def _constants(self, index: int, needed: set[int]) -> list[Unit]:
        """The units of constants that a layer executes itself, in order."""
        found: dict[int, Unit] = {}
        waiting = list(needed)
        while waiting:
            number = waiting.pop()
            unit = self.makers.get(number)
            if unit is None or id(unit) in found:
                continue
            if number in self.first and self._passed_on(number):
                needed.add(number)
                continue
            found[id(unit)] = unit
            waiting += unit.uses
        return sorted(found.values(), key=lambda unit: self.order[id(unit)])

    def _passed_on(self, number: int) -> bool:
        if not self.graph.values[number].dtype.is_floating_point:
            return False  # made by a few comparisons
        return self.graph.values[number].bytes * SMALL <= min(self.layers.alive, default=0)

    def _use(self, number: int, index: int) -> None:
        """Note that a layer uses a tensor that an earlier one makes."""
        if number in self.first and self.first[number] < index:
            self.users[number].append(index)

    def _referred(self, part: Part, index: int) -> set[int]:
        """An input that says the number of samples, if no tensor that arrives does, where the layer needs it."""
        kinds = {type(leaf) for node in part.nodes for leaf in (*leaves(node.args), *leaves(node.kwargs))}
        if not kinds & {Samples, Scaled} or not index:
            return set()
        values = [self.graph.values[number] for node in part.nodes for number in used(node)]
        if any(v.batch_dim and self.first.get(v.number, index) < index for v in values):
            return set()
        return {next(n for n in self.graph.trace.inputs if self.graph.values[n].batch_dim)}

    def _keep_connected(self, count: int) -> None:
        """Something passes from each layer to the next one: one tensor all the same, if that needs only what jumps."""
        for index in range(1, count):
            alive = [n for n, made in self.first.items() if made < index and max(self.users[n], default=-1) >= index]
            here = [n for n in alive if self.first[n] == index - 1 or index - 1 in self.users[n]]
            if not any(index in self.users[number] for number in here):
                number = min(here or alive, key=lambda number: (self.graph.values[number].bytes, number))
                self.users[number] += [index] if here else [index - 1, index]

    def _connect(self, parts: list[Part]) -> None:
        for number, made in self.first.items():
            stops = sorted({made, *self.users[number]})
            for source, target in itertools.pairwise(stops):
                if target == source + 1:
                    parts[source].gives.append(number)
                    parts[target].takes.append(number)
                else:
                    name = f"{number}_to_{target}"
                    parts[source].stashes[name] = parts[target].pops[name] = number
        parts[0].takes = list(self.graph.trace.inputs)
        parts[-1].gives = list(self.graph.trace.outputs)
        for index, (part, following) in enumerate(itertools.pairwise(parts)):
            part.gives.sort(key=lambda number: (-self.first[number], number))
            following.takes = list(part.gives)
            part.assigns = self._assigned(index)
        parts[-1].assigns = self._assigned(len(parts) - 1)

    def _assigned(self, index: int) -> list[tuple[State, int]]:
        """The buffers and attributes that a layer replaces; modules that run as they are do so themselves."""
        nodes = [node for unit in self._units() for node in unit.nodes if isinstance(node, Call)]
        found = []
        for state, number in self.graph.trace.replaced.items():
            holders = {id(module) for module in self.graph.holders(state)}
            made = self.graph.made_at(number)
            native = any(
                self.graph.inside(made, node) and any(id(module) in holders for module in node.module.modules())
                for node in nodes
            )
            if not native and self.first.get(number) == index:
                found.append((state, number))
        return found

    def _units(self) -> Iterator[Unit]:
        return (unit for layer in self.layers.layers for unit in layer)
