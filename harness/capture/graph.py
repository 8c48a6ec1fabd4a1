"""What a trace says of itself: who makes and uses each tensor, which module calls can run as they are, which repeat.

A call runs as it is (its module's own Python code) unless that would lose something: a tensor that goes in or out by
another way than arguments and result, or an object that each pass makes for itself, as a cache of keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from torch import nn

from harness.capture.agreement import Unstable
from harness.capture.structure import leaves, refs
from harness.capture.trace import Call, Item, State, Step, Trace, Uncapturable, Value, used

OTHER_WAY = "the forward pass is another one for another number of samples, another dtype or by chance"
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Graph:
    """A trace in the order of execution: place k is the k-th step or (the start of a) module call."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.values = trace.values
        self.start: dict[int, int] = {}
        self.end: dict[int, int] = {}
        self.leaf_items: list[tuple[int, Item]] = []
        self.makers: dict[int, int] = {}
        self.users: dict[int, list[int]] = {value.number: [] for value in trace.values}
        self._count = 0
        self._natives: dict[int, bool] = {}
        self._index(trace.top)
        for number in trace.outputs:
            self.users[number].append(self._count)

    def _index(self, item: Item) -> None:
        place = self.start[id(item)] = self._count
        self._count += 1
        for number in used(item):
            self.users[number].append(place)
        if isinstance(item, Call) and not item.opaque:
            for child in item.items:
                self._index(child)
        else:
            self.leaf_items.append((place, item))
            for number in item.holds if isinstance(item, Call) else ():
                self.users[number].append(place)
            for number in refs(item.result):
                if self.values[number].source is None:
                    self.makers.setdefault(number, place)
        self.end[id(item)] = self._count

    def made_at(self, number: int) -> int:
        """The place where a tensor is made: -1 of the inputs; one of unknown origin is there when it is used first."""
        value = self.values[number]
        if value.unknown and number not in self.makers:
            return min(self.users[number])
        return self.makers.get(number, -1)

    def is_held(self, value: Value) -> bool:
        """Whether a module holds it, or it is a tensor from outside of the model."""
        return value.source is not None and not isinstance(value.source, int)

    def inside(self, place: int, call: Item) -> bool:
        """Whether a place is in a call."""
        return self.start[id(call)] <= place < self.end[id(call)]

    def held_by(self, item: Item) -> set[int]:
        """The weights, buffers and other held tensors that it uses, also inside."""
        return {number for number, places in self._held_users.items() if any(self.inside(p, item) for p in places)}

    @cached_property
    def _held_users(self) -> dict[int, list[int]]:
        return {value.number: self.users[value.number] for value in self.values if self.is_held(value)}

    @cached_property
    def changed_storages(self) -> dict[int, list[int]]:
        """Storages that are changed in place, with the places where that happens."""
        found: dict[int, list[int]] = {}
        for place, item in self.leaf_items:
            for number in item.mutated if isinstance(item, Step) else ():
                found.setdefault(self.values[number].storage, []).append(place)
        for state, number in self.trace.replaced.items():
            old = [value for value in self.values if value.source == state]
            for value in old:
                found.setdefault(value.storage, []).append(self.made_at(number))
        return found

    @cached_property
    def constants(self) -> set[int]:
        """Tensors that depend on sizes alone: masks of a causal attention, rotary tables."""
        found: set[int] = set()
        for _, item in self.leaf_items:
            if isinstance(item, Call) or item.random or item.mutated:
                continue
            values = [self.values[number] for number in used(item)]
            if all(self._is_constant(value, found) for value in values):
                found |= {number for number in refs(item.result) if number in self.makers}
        return found

    def _is_constant(self, value: Value, found: set[int]) -> bool:
        if value.storage in self.changed_storages:
            return False
        return value.number in found or (self.is_held(value) and not value.requires_grad)

    def native(self, call: Call) -> bool:
        """Whether its module can run as it is."""
        if id(call) not in self._natives:
            self._natives[id(call)] = call.opaque or not (
                any(isinstance(leaf, Unstable) for leaf in leaves(call.args))
                or any(isinstance(leaf, Unstable) for leaf in leaves(call.kwargs))
                or self._leaks(call)
            )
        return self._natives[id(call)]

    @property
    def root(self) -> Call:
        """The call of the model itself."""
        found = self.trace.top.items[0]
        assert isinstance(found, Call)
        return found

    def can_open(self, call: Call) -> bool:
        """Whether its parts can run one by one: each is a module that runs as it is, or a function of torch that is
        given no object of each pass."""
        return not (call.opaque or call.differs) and all(map(self._can_run, call.items))

    def _can_run(self, item: Item) -> bool:
        if isinstance(item, Call):
            return self.native(item) or self.can_open(item)
        return not any(isinstance(leaf, Unstable) for leaf in (*leaves(item.args), *leaves(item.kwargs)))

    def _leaks(self, call: Call) -> bool:
        given, returned = used(call), set(refs(call.result))
        own = {id(module) for module in call.module.modules()}
        for value in self.values:
            number = value.number
            within = [place for place in self.users[number] if self.inside(place, call)]
            if self.is_held(value):
                state = value.source
                if within and isinstance(state, State) and not self._holds(call.module, own, value):
                    return True
            elif self.inside(self.made_at(number), call):
                if len(within) < len(self.users[number]) and number not in returned:
                    return True
            elif number not in given and any(place > self.start[id(call)] for place in within):
                return True
        return False

    def _holds(self, module: nn.Module, own: set[int], value: Value) -> bool:
        """Whether a held tensor is one of the module's, or is given to it."""
        state = value.source
        assert isinstance(state, State)
        return any(id(holder) in own for holder in self.holders(state))

    def holders(self, state: State) -> list[nn.Module]:
        """All modules that hold the tensor of a place."""
        return self._holders[state]

    @cached_property
    def _holders(self) -> dict[State, list[nn.Module]]:
        modules = dict(self.root.module.named_modules())
        by_tensor: dict[int, list[nn.Module]] = {}
        for module in modules.values():
            for table in (module._parameters, module._buffers, vars(module)):
                for tensor in table.values():
                    by_tensor.setdefault(id(tensor), []).append(module)
        states = {value.source for value in self.values if isinstance(value.source, State)} | self.trace.replaced.keys()
        return {s: by_tensor[id(getattr(modules[s.path], s.table)[s.name])] for s in states}

    def nodes(self, item: Item) -> list[Item]:
        """What is executed for an item: a step, a module as it is, or what a module does."""
        if isinstance(item, Step) or self.native(item):
            return [item]
        if item.differs:
            raise Uncapturable(OTHER_WAY, item.differs)
        return [node for child in item.items for node in self.nodes(child)]

    def cost(self, item: Item) -> float:
        """The cost of all steps of an item."""
        if isinstance(item, Step):
            return item.cost
        return item.flops + sum(map(self.cost, item.items))

    def flops(self, item: Item) -> float:
        """The FLOPs of its matmuls."""
        return item.flops + sum(map(self.flops, item.items))

    def leaf_range(self, first: int, end: int) -> Iterator[tuple[int, Item]]:
        """The steps and opaque calls at places first .. end - 1."""
        return ((place, item) for place, item in self.leaf_items if first <= place < end)
