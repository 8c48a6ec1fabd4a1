"""State that layers of several stages share: a copy on each device is right as long as no forward pass changes it.

    stage 0   layer 0 --\\
                         one module in two places; one buffer, tensor or list of two modules, or in lists of theirs;
    stage 1   layer 3 --/   two tensors that overlap

A layer's state is what its modules hold: buffers, frozen parameters and plain attributes. In place, a pass may change
whatever two stages hold; it may replace what belongs to a module, unless two stages hold that module.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import CellType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _NormBase

from harness.core.model_profile import SharedBuffer
from harness.core.problem import ProblemError
from harness.core.shared_buffers import Home, not_to_be_copied
from harness.nn.object_state import global_containers, hidden_modules, reachable
from harness.nn.tensor_memory import overlapping
from harness.nn.tied import tensor_bytes, version

Places = list[tuple[str, Home]]
"""Layers with their homes."""
IMMUTABLE = (bool, int, float, complex, str, bytes, type(None))
OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
UNPICKLABLE = (pickle.PicklingError, TypeError, AttributeError, NotImplementedError, RuntimeError)
"""What objects raise that cannot be pickled: locks, open files, process groups."""


@dataclass
class _Shared:
    """A module or a value that several layers hold: `holders` are the modules in use, each with its key of the value.

    `name` is the first one in the whole model: "0.norm.count" of a value, "0.norm." of a module. A buffer has bytes.
    `parts` are objects that no module has as its attribute, but in a list or another object.
    """

    name: str
    places: dict[tuple[str, Home], None] = field(default_factory=dict)
    holders: list[tuple[nn.Module, str]] = field(default_factory=list)
    bytes: int | None = None
    statistics: bool = False
    parts: dict[int, Any] = field(default_factory=dict)

    @property
    def spread(self) -> bool:
        return len({home for _, home in self.places}) > 1


class SharedState:
    """The state that layers of several homes share; layer k of `named` is in the stage and on the device `homes[k]`.

    `used[k]` is the module that runs as layer k, a copy with the same submodules, if it is not the layer itself.
    """

    def __init__(
        self, named: Sequence[tuple[str, nn.Module]], homes: Sequence[Home], used: Sequence[nn.Module] = ()
    ) -> None:
        modules: dict[int, _Shared] = {}
        values: dict[int, _Shared] = {}
        inside: dict[int, _Shared] = {}
        parts: dict[int, list[Any]] = {}
        for (name, layer), home, runs in zip(named, homes, used or [layer for _, layer in named], strict=True):
            for (path, module), twin in zip(layer.named_modules(), runs.modules(), strict=True):
                prefix = f"{name}.{path}." if path else f"{name}."
                _hold(modules, module, prefix, (name, home), (twin, ""))
                for key, value in _state(module).items():
                    if not isinstance(value, IMMUTABLE):
                        shared = _hold(values, value, prefix + key, (name, home), (twin, key))
                        if key in module._buffers:
                            shared.bytes = tensor_bytes(value)
                            shared.statistics |= isinstance(module, _NormBase)
                        if id(value) not in parts:
                            parts[id(value)] = [*_changeable(value)]
                        for part in parts[id(value)]:
                            shared = inside.setdefault(id(part), _Shared(prefix + key))
                            shared.places[name, home] = None
                            shared.parts[id(part)] = part
        self._modules = [one for one in modules.values() if one.spread]
        self._values = [one for one in values.values() if one.spread]
        self._values += [*_only_inside(self._values, inside), *_overlaps(values, inside)]
        self._hooks = _hooks(named, homes, used or [layer for _, layer in named])
        self._ways = _ways(named, homes, used or [layer for _, layer in named])

    def of_hooks(self) -> SharedState:
        """Only what hooks share: those of backward passes change it where nobody else looks."""
        alone = SharedState([], [])
        alone._hooks = self._hooks
        return alone

    @property
    def statistics(self) -> dict[str, Places]:
        """The running statistics of batch norms: every pass changes them, in versions that torch does not count."""
        return {one.name: list(one.places) for one in self._values if one.statistics}

    def refuse(self, changed: dict[str, Places]) -> None:
        """Raises ProblemError with what a pass has changed."""
        if changed:
            raise ProblemError(*(not_to_be_copied(name, places) for name, places in changed.items()))

    @contextmanager
    def unchanged(self, recomputed: bool = False) -> Iterator[None]:
        """Around a step. Raises ProblemError if it has changed something; if tasks are `recomputed`, also tensors
        that a layer keeps where another stage reaches them: the recomputation of one stage would find what another one
        has made, without its gradient."""
        before = [(one, _Snapshot(way())) for one, way in self._ways] if recomputed else []
        with self.noting() as changed:
            yield
        for (one, way), (_, then) in zip(self._ways, before, strict=False):
            if then.differs(way()):
                changed.setdefault(one.name, list(one.places))
        self.refuse(changed)

    @contextmanager
    def noting(self) -> Iterator[dict[str, Places]]:
        """Around passes. What is yielded has the names of what they have changed, and who shares it: also of objects
        that hooks of several stages have."""
        changed: dict[str, Places] = {}
        seen: dict[int, _Snapshot] = {}

        def snapshot(value: Any) -> _Snapshot:
            if id(value) not in seen:
                seen[id(value)] = _Snapshot(value)
            return seen[id(value)]

        values = [(one, snapshot(value)) for one in self._values for value in _held(one)]
        modules = [
            (one, module, {key: snapshot(value) for key, value in _state(module).items()})
            for one in self._modules
            for module in dict(one.holders)
        ]
        hooks = [(one, snapshot(way())) for one, way in self._hooks]
        yield changed
        for one, before in (*hooks, *values):
            if before.differs(before.value):
                changed[one.name] = [*dict.fromkeys([*changed.get(one.name, []), *one.places])]
        for one, module, state in modules:
            now = _state(module)
            for key in now.keys() | state.keys():
                if key not in now or key not in state or _replaced(state[key], now[key]):
                    changed.setdefault(one.name + key, list(one.places))

    def in_profile(self, changed: dict[str, Places]) -> dict[str, tuple[SharedBuffer, ...]]:
        """Maps each layer to the buffers that it shares, and to what else it shares of what passes have changed."""
        sizes: dict[tuple[str, str], int] = {}
        for name, places in changed.items():
            sizes |= {(layer, name): 0 for layer, _ in places}
        for one in self._values:
            sizes |= {(layer, one.name): one.bytes for layer, _ in one.places if one.bytes is not None}
        found: dict[str, list[SharedBuffer]] = {}
        for (layer, name), size in sizes.items():
            found.setdefault(layer, []).append(SharedBuffer(name, size, name in changed))
        return {layer: tuple(own) for layer, own in found.items()}


def _ways(
    named: Sequence[tuple[str, nn.Module]], homes: Sequence[Home], used: Sequence[nn.Module]
) -> list[tuple[_Shared, Callable[[], Any]]]:
    """What tensors may go through from stage to stage, past the pipeline, each with what it holds: the attributes of a
    module that a layer of another stage has in a list."""
    found: dict[int, _Shared] = {}
    held: dict[int, Callable[[], Any]] = {}
    for (name, _), home, layer in zip(named, homes, used, strict=True):
        own = dict.fromkeys(layer.modules())
        for module in own:
            _hold(found, module, f"{name}: a tensor of {type(module).__name__}", (name, home), (module, ""))
            held[id(module)] = partial(_plain_tensors, module)
        for hidden in hidden_modules(value for module in own for value in _plain(module).values()):
            if hidden not in own:
                _hold(found, hidden, f"{name}: a tensor of {type(hidden).__name__}", (name, home), (hidden, ""))
                held[id(hidden)] = partial(_plain_tensors, hidden)
    return [(one, held[key]) for key, one in found.items() if one.spread]


def _hooks(
    named: Sequence[tuple[str, nn.Module]], homes: Sequence[Home], used: Sequence[nn.Module]
) -> list[tuple[_Shared, Callable[[], Any]]]:
    """What the hooks of layers of several homes have, which each of their processes would change for itself."""
    found: dict[int, _Shared] = {}
    held: dict[int, Callable[[], Any]] = {}
    for (name, _), home, layer in zip(named, homes, used, strict=True):
        for module in layer.modules():
            for key, value in _closures(module):
                _hold(found, value, f"{name}: {key}", (name, home), (module, key))
                held[id(value)] = partial(_itself, value)
    return [(one, held[key]) for key, one in found.items() if one.spread]


def _itself(value: Any) -> Any:
    return value


def _plain_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {key: value for key, value in _plain(module).items() if isinstance(value, Tensor)}


def _closures(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What the hooks of a module and of its parameters have in their closures or name globally, or are methods of, and
    may change; and hooks that are objects."""
    forward = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    backward = [*module._backward_pre_hooks.values(), *module._backward_hooks.values()]
    for parameter in module.parameters(recurse=False):
        for own in (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)):
            backward += (own or {}).values()
    for kind, hooks in (("forward", forward), ("backward", backward)):
        for hook in hooks:
            for name, value in _held_by(hook).items():
                yield f"{name!r} of a {kind} hook", value


def _held_by(hook: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if isinstance(hook, MethodType):
        values["self"] = hook.__self__
    elif isinstance(hook, partial):
        values |= {str(number): value for number, value in enumerate((*hook.args, *hook.keywords.values()))}
    elif isinstance(hook, FunctionType):
        values |= global_containers(hook)
        for name, cell in zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True):
            with suppress(ValueError):  # it is empty
                values[name] = cell.cell_contents
    else:
        values[type(hook).__name__] = hook
    return {name: value for name, value in values.items() if not isinstance(value, (*IMMUTABLE, nn.Module, type))}


class _Snapshot:
    """A value as it is now: the form in which pickle writes it, and copies of the tensors in it."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._form, self._tensors = _form(value)
        self._copies = [(version(tensor), tensor.detach().clone()) for tensor in self._tensors]

    def differs(self, now: Any) -> bool:
        """Says whether a value, or the same one later, is not what this one was."""
        form, tensors = _form(now)
        pairs = zip(self._tensors, self._copies, tensors, strict=False)
        return form != self._form or any(_changed(then, *copied, tensor) for then, copied, tensor in pairs)


class _Form(pickle.Pickler):
    """Writes all but tensors, which it collects, and what is compared by identity: code, modules and weights."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Tensor) and not (isinstance(value, nn.Parameter) and value.requires_grad):
            self.tensors.append(value)
            return "tensor"
        return id(value) if isinstance(value, (Tensor, nn.Module, type, FunctionType, ModuleType)) else None

    def reducer_override(self, value: Any) -> Any:
        """What cannot be pickled by its identity, a generator by where it stands: else whatever holds it could not be
        compared."""
        if isinstance(value, CellType):
            return tuple, ((id(value), *_contents(value)),)
        if isinstance(value, GeneratorType):
            frame = value.gi_frame
            return tuple, ((id(value), *((frame.f_lasti, dict(frame.f_locals)) if frame else ())),)
        try:
            value.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        except UNPICKLABLE:
            return int, (id(value),)
        return NotImplemented


def _contents(cell: CellType) -> tuple[Any, ...]:
    """What a function's closure has in a cell; nothing if it is empty."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _form(value: Any) -> tuple[bytes, list[Tensor]]:
    """The bytes of a value and the tensors in it; its identity where it cannot be pickled."""
    file = io.BytesIO()
    form = _Form(file)
    try:
        form.dump(value)
    except UNPICKLABLE:
        return id(value).to_bytes(8), []
    return file.getvalue(), form.tensors


def _changed(then: Tensor, versions: int, copied: Tensor, now: Tensor) -> bool:
    """Whether a tensor is another one than `then`, in values; those without values by identity and version.

    Engines may copy a frozen parameter onto itself: for these only values count.
    """
    known = not any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in (copied, now))
    if now is then and version(now) != versions and not (known and isinstance(now, nn.Parameter)):
        return True
    if not known:
        return now is not then
    if (copied.shape, copied.dtype, copied.device) != (now.shape, now.dtype, now.device):
        return True
    now = now.detach()
    return not torch.equal(copied, now) and not bool(((copied == now) | ((copied != copied) & (now != now))).all())


def _replaced(before: _Snapshot, now: Any) -> bool:
    return now is not before.value and before.differs(now)


def _held(shared: _Shared) -> list[Any]:
    """The value on each device; one that a module has replaced by another is its own from then on."""
    found = {id(value): value for module, key in shared.holders if (value := _state(module).get(key)) is not None}
    return list((found | shared.parts).values())


def _changeable(value: Any) -> Iterator[Any]:
    """What a value leads to, itself included, but for modules and trained weights."""
    for one in reachable([value]):
        if not (isinstance(one, nn.Module) or (isinstance(one, nn.Parameter) and one.requires_grad)):
            yield one


def _only_inside(values: Sequence[_Shared], inside: Mapping[int, _Shared]) -> Iterator[_Shared]:
    """What layers of several homes share, and not as a part of something else that all of them share."""
    covered: dict[int, set[tuple[str, Home]]] = {}

    def cover(shared: _Shared, roots: Iterable[Any]) -> None:
        for one in reachable(roots, functions=False):  # a snapshot has no more of a function than its name
            covered.setdefault(id(one), set()).update(shared.places)

    for shared in values:
        cover(shared, _held(shared))
    for key, shared in inside.items():
        if shared.spread and not covered.get(key, set()) >= shared.places.keys():
            cover(shared, shared.parts.values())
            yield shared


def _overlaps(values: Mapping[int, _Shared], inside: Mapping[int, _Shared]) -> Iterator[_Shared]:
    """Different tensors that overlap, of layers of several homes."""
    tensors = [one for shared in inside.values() for one in shared.parts.values() if isinstance(one, Tensor)]
    for group in overlapping(tensors):
        own = {id(one): inside[id(one)] for one in group}
        shared = _Shared(next(inside[key].name for key in inside if key in own))
        for key, one in own.items():
            shared.places |= one.places
            if key in values:
                shared.holders += values[key].holders
            else:
                shared.parts |= one.parts
        if shared.spread:
            yield shared


def _hold(
    found: dict[int, _Shared], what: object, name: str, place: tuple[str, Home], holder: tuple[nn.Module, str]
) -> _Shared:
    shared = found.setdefault(id(what), _Shared(name))
    shared.places[place] = None
    shared.holders.append(holder)
    return shared


def _state(module: nn.Module) -> dict[str, Any]:
    """Buffers, frozen parameters and plain attributes of a module itself."""
    frozen = {key: value for key, value in module._parameters.items() if value is not None and not value.requires_grad}
    return {**{key: value for key, value in module._buffers.items() if value is not None}, **frozen, **_plain(module)}


def _plain(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(module).items() if key not in OF_EVERY_MODULE}
