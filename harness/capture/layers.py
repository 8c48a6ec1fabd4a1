"""The layers of a captured model: they hold its own modules and weights, under their own names.

chain   "blocks_0.model.blocks.0.norm.weight"        what follows the layer's name
model             "model.blocks.0.norm.weight"       is the name in the model
"""

from __future__ import annotations

import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from harness.capture.chain import Part
from harness.capture.graph import Graph
from harness.capture.program import WHERES, Program, outside_name
from harness.capture.structure import Ref, built, flat, tensors
from harness.capture.trace import Call, State, Step, shown, used
from harness.core.model_profile import Unsplit
from harness.nn import dropout
from harness.nn.skip import Skippable


class Scope(nn.Module):
    """Stands for a module of which a layer holds parts."""


class Layer(Skippable):
    """A part of a model: takes and gives a tensor or a tuple of tensors, and skips.

    `source` is the text of its forward pass. `inplace` says whether it changes what it takes, `number` is its place in
    the chain: if it `draws` random numbers, they are a function of it and of `part` in an engine
    (`harness.nn.dropout.drawing`).
    """

    def __init__(self, program: Program, number: int, evaluates: bool, inplace: bool, draws: bool) -> None:
        super().__init__()
        self.number, self.draws, self.part = number, draws, 0
        self.stashes, self.pops = tuple(program.part.stashes), tuple(program.part.pops)
        self.source = program.source
        self.inplace = inplace
        self.evaluates = evaluates
        self._run = program.function()

    def forward(self, value: Tensor | tuple[Tensor, ...]) -> Any:
        """What the model does here; its errors have a note with the line of the model."""
        device = tensors(value)[0].device
        try:
            with dropout.drawing(self.number, device, self.part) if self.draws else nullcontext():
                return self._run(self, value)
        except Exception as error:
            self._note(error)
            raise

    def _note(self, error: Exception) -> None:
        for frame, number in traceback.walk_tb(error.__traceback__):
            if where := WHERES.get(frame.f_code, {}).get(number):
                file, line, code = shown(where)
                error.add_note(f"in {file}:{line}, `{code}`")

    def train(self, mode: bool = True) -> Layer:
        """As of every module. Raises NotImplementedError for a model that evaluates in another way than it trains."""
        if not mode and not self.evaluates:
            raise NotImplementedError("in evaluation this model calls other functions than in training: it only trains")
        return super().train(mode)

    def extra_repr(self) -> str:
        return self.source


class Whole(nn.Module):
    """A module as one layer: takes the tensors of its arguments, gives those of its result.

    `shared` are those that are the same in each call, numbered after the others. `unsplit` says what prevents more
    layers, if something does.
    """

    unsplit: Unsplit | None = None
    draws = True
    """It may, as a `Layer` may."""
    part = 0

    def __init__(
        self,
        module: nn.Module,
        args: Any,
        kwargs: Any,
        select: Callable[[Any], Any] | None = None,
        shared: Sequence[Tensor] = (),
    ) -> None:
        super().__init__()
        self.module = module
        self._args, self._kwargs, self.select = args, kwargs, select
        for number, tensor in enumerate(shared):
            self.register_buffer(outside_name(number), tensor, persistent=False)

    def forward(self, value: Tensor | tuple[Tensor, ...]) -> Any:
        given: list[Any] = [*tensors(value), *self._buffers.values()]
        args, kwargs = (
            built(form, lambda leaf: given[leaf.number] if isinstance(leaf, Ref) else leaf)
            for form in (self._args, self._kwargs)
        )
        with dropout.drawing(0, given[0].device, self.part):
            result = self.module(*args, **kwargs)
        return flat(self.select(result) if self.select else result)


def build(module: nn.Module, graph: Graph, parts: Sequence[Part], evaluates: bool) -> nn.Sequential:
    """The layers of `module` as `parts` say, in order and by name."""
    modules = dict(module.named_modules(remove_duplicate=False))
    chain: OrderedDict[str, nn.Module] = OrderedDict()
    for index, part in enumerate(parts):
        program = Program(graph, part)
        layer = Layer(program, index, evaluates, _changes_input(graph, part), _draws(part))
        _hold(layer, graph, part, program, modules)
        layer.training = module.training
        chain[_name(graph, part, index, chain)] = layer
    _hold_rest(module, modules, list(chain.values()))
    layers = nn.Sequential(chain)
    layers.training = module.training
    return layers


def names(chain: nn.Sequential) -> dict[str, str]:
    """The name in the model of each parameter and buffer of a chain that `split` or `whole` has made."""
    found = {}
    for layer, part in chain._modules.items():
        for name in [*dict(_named(part, "_parameters")), *dict(_named(part, "_buffers"))]:
            found[f"{layer}.{name}"] = name.removeprefix("module.") if isinstance(part, Whole) else name
    return found


def unsplit(chain: nn.Sequential) -> Unsplit | None:
    """Why a chain is one layer, if `split_or_whole` could not make more."""
    return next((layer.unsplit for layer in chain if isinstance(layer, Whole)), None)


def _hold(layer: Layer, graph: Graph, part: Part, program: Program, modules: dict[str, nn.Module]) -> None:
    """Put the modules and tensors into a layer that its forward pass uses."""
    calls = {node.path for node in part.nodes if isinstance(node, Call)}
    for path in sorted(calls, key=len):
        parent, _, name = path.rpartition(".")
        _scope(layer, parent, modules)._modules[name] = modules[path]
    given = {number for node in part.nodes for number in used(node)} | set(part.gives)
    states = {value.source: None for value in graph.values if value.number in given}
    for state in [*states, *(state for state, _ in part.assigns)]:
        if isinstance(state, State):
            _hold_tensor(layer, state, modules)
    for number, tensor in enumerate(program.outside):
        layer.register_buffer(outside_name(number), tensor, persistent=False)


def _scope(layer: nn.Module, path: str, modules: dict[str, nn.Module]) -> nn.Module:
    """The module of a layer at a path of the model."""
    here = ""
    for name in path.split(".") if path else ():
        here = f"{here}.{name}" if here else name
        if name not in layer._modules:
            layer._modules[name] = Scope().train(modules[here].training)
        found = layer._modules[name]
        assert found is not None
        layer = found
    return layer


def _hold_tensor(layer: nn.Module, state: State, modules: dict[str, nn.Module]) -> None:
    owner, scope = modules[state.path], _scope(layer, state.path, modules)
    if scope is owner:
        return
    getattr(scope, state.table)[state.name] = getattr(owner, state.table)[state.name]
    if state.name in owner._non_persistent_buffers_set:
        scope._non_persistent_buffers_set.add(state.name)


def _hold_rest(module: nn.Module, modules: dict[str, nn.Module], layers: list[nn.Module]) -> None:
    """Put what no layer uses, and further names of what is used, where the tensor is, else into the first layer."""
    for table in ("_parameters", "_buffers"):
        homes: dict[int, nn.Module] = {}
        known: set[str] = set()
        for layer in layers:
            for name, tensor in _named(layer, table):
                known.add(name)
                homes.setdefault(id(tensor), layer)
        for name, tensor in _named(module, table):
            if name not in known:
                path, _, own = name.rpartition(".")
                _hold_tensor(homes.get(id(tensor), layers[0]), State(path, table, own), modules)


def _named(module: nn.Module, table: str) -> list[tuple[str, Tensor]]:
    """Parameters or buffers by all their names."""
    return [
        (f"{path}.{name}" if path else name, tensor)
        for path, each in module.named_modules(remove_duplicate=False)
        for name, tensor in getattr(each, table).items()
        if tensor is not None
    ]


def _changes_input(graph: Graph, part: Part) -> bool:
    storages = {graph.values[number].storage for number in part.arrives()}
    return any(graph.values[number].storage in storages for step in _steps(part) for number in step.mutated)


def _draws(part: Part) -> bool:
    opaque = any(isinstance(node, Call) and node.has_opaque() for node in part.nodes)
    return opaque or any(step.random for step in _steps(part))


def _steps(part: Part) -> list[Step]:
    return [step for node in part.nodes for step in (node.steps() if isinstance(node, Call) else [node])]


def _name(graph: Graph, part: Part, index: int, taken: OrderedDict[str, nn.Module]) -> str:
    """A name by what costs most: "blocks_0". A single word, as attributes of engines are, gets the layer's number."""
    largest = max(part.nodes, key=lambda node: (graph.flops(node), graph.cost(node)), default=None)
    if isinstance(largest, Step) or largest is None:
        word = getattr(largest.function, "__name__", type(largest.function).__name__) if largest else "layer"
        return f"{word.strip('_')}_{index}"
    name = largest.path.replace(".", "_")
    return f"{name}_{index}" if "." not in largest.path or name in taken else name
