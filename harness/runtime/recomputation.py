"""State that a forward pass changes in the layers: a recomputation sees what the first run saw, and changes nothing.
What cannot be put back so is refused, or noticed by the outputs (harness.runtime.output_check).

    first runs       buffer b0 --F0--> b1 --F1--> b1 --F2--> b2      copies of b0 and b1 stay
    recomputations   R2 and R1 get b1 in its place, R0 gets b0; afterwards the module has b2 again

Every buffer has a copy before a first run, so that the value is there also where a change comes unexpectedly. As long
as the buffer does not change, all tasks share that copy. Batch norms that only torch's own containers hold need none:
what they compute in training does not depend on their running statistics. Objects among the attributes hold again what
they held (harness.nn.object_state). Layers of torch.nn without buffers and hooks have no state.

Not seen are global names but containers that a hook names, attributes of classes, what other libraries' objects hold
(`threading.local`), and random numbers of Python's and NumPy's global generators: all threads share these, so that no
task can set them back. If outputs depend on them, that is noticed; if only gradients do, it is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from harness.nn.batchnorm import DeferredBatchNorm, statistics, throwaway
from harness.nn.object_state import ITERATORS, SCALARS, Frozen, Snapshot, TooMany, hidden_modules
from harness.nn.tied import version
from harness.runtime import output_check
from harness.runtime.output_check import Sample
from harness.runtime.silent_writes import SilentWrites
from harness.runtime.values import overlap

_ABSENT = object()
LEAVES = (*SCALARS, Tensor)
"""What leads to no other objects."""
_VIEW = (
    "the forward pass changes {}, whose memory other state shows, too: a recomputation would get separate copies "
    "-> one tensor for it, or checkpoint='never'"
)


class Place(NamedTuple):
    """Place of a value in a module: in its buffers, or among its plain attributes."""

    module: nn.Module
    name: str
    is_buffer: bool

    @property
    def values(self) -> dict[str, Any]:
        return self.module._buffers if self.is_buffer else self.module.__dict__

    @property
    def value(self) -> Any:
        return self.values.get(self.name, _ABSENT)

    def put(self, value: Any) -> None:
        if value is _ABSENT:
            self.values.pop(self.name, None)
        else:
            self.values[self.name] = value

    def __str__(self) -> str:
        return f"{self.name!r} of {type(self.module).__name__}"


@dataclass(frozen=True)
class _Copy:
    """A tensor in its `version`, and its value then; tasks between which it does not change share it."""

    tensor: Tensor
    version: int
    value: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> _Copy:
        return cls(tensor, version(tensor), tensor.detach().clone())

    def is_of(self, tensor: object) -> bool:
        return tensor is self.tensor and version(self.tensor) == self.version


@dataclass(frozen=True)
class _Weight:
    """A parameter in its version."""

    module: nn.Module
    name: str
    parameter: Tensor
    version: int

    def is_now(self, parameter: Tensor | None) -> bool:
        return parameter is self.parameter and version(self.parameter) == self.version

    def __str__(self) -> str:
        return f"{self.name!r} of {type(self.module).__name__}"


@dataclass
class Before:
    """What a task saw in its first run: the attributes of modules, tensors as `_Copy`, iterators as `Frozen`; what the
    objects among them held; weights, and which modules trained. State that is missing here is newer. Then samples of
    its outputs."""

    where: str
    modules: list[nn.Module]
    values: dict[Place, Any]
    objects: Snapshot
    weights: list[_Weight]
    training: list[bool]
    outputs: list[Sample] | None = None

    def same_outputs(self, outputs: Iterable[Tensor]) -> None:
        """Those of the first run are kept, those of a recomputation compared; raises RuntimeError if they differ."""
        if self.outputs is None:
            self.outputs = output_check.samples(outputs)
        else:
            output_check.compare(self.outputs, outputs, self.where)


class ForwardState:
    """The state of some modules around first runs and recomputations; one thread at a time makes them.

    State is buffers and attributes, and what objects hold that can be reached from them and from forward hooks, modules
    among them, but for `others`. A parameter that the forward pass changes, or that is changed before the
    recomputation, is refused. `where` is for messages.
    """

    def __init__(self, modules: Iterable[nn.Module], where: str, others: Iterable[nn.Module] = ()) -> None:
        own = list(dict.fromkeys(modules))
        hidden = hidden_modules(value for module in own for _, value in (*_state(module), *_hook_roots(module)))
        self.others = list(others)
        self.modules = list(dict.fromkeys([*own, *(one for one in hidden if one not in set(self.others))]))
        self.where = where
        read = {part for module in own if not _of_torch(module) for part in module.modules()} | set(hidden)
        self._watched = [one for one in self.modules if not ((_plain_norm(one) and one not in read) or _stateless(one))]
        self._others = [module for module in self.modules if _stateless(module)]  # they may get buffers, or hooks
        self._copies: dict[int, _Copy] = {}
        self._compared: set[tuple[nn.Module, bool]] = set()
        self._unversioned: set[Place] = set()
        self._writes = SilentWrites()

    def __getstate__(self) -> tuple[list[nn.Module], str, list[nn.Module]]:
        """A copy begins like a new one."""
        return self.modules, self.where, self.others

    def __setstate__(self, state: tuple[list[nn.Module], str, list[nn.Module]]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def without(self, others: Iterable[nn.Module]) -> ForwardState:
        """The same without the modules `others`, of which another thread takes care."""
        left_out = set(others)
        return ForwardState([one for one in self.modules if one not in left_out], self.where, left_out)

    @contextmanager
    def first_run(self) -> Iterator[Before]:
        """Around a run that will be repeated; what is yielded is for its recomputation."""
        known, self._copies, now = self._copies, {}, self._values()
        seen = {place: self._kept(value, place, known) for place, value in now.items()}
        objects = Snapshot(self._roots(now), lambda value: self._kept(value, None, known))
        weights = [_Weight(module, *pair, version(pair[1])) for module in self.modules for pair in _parameters(module)]
        changed = self._writes.before(one.parameter for one in weights)
        yield Before(self.where, self._stateful(), seen, objects, weights, [one.training for one in self.modules])
        late = changed()
        for one in weights:
            if version(one.parameter) != one.version or one.parameter is late:
                raise RuntimeError(
                    f"the forward pass changes the parameter {one}, and its recomputation would change it again "
                    "-> make it a buffer, or checkpoint='never'"
                )
        self._learn(seen)
        self._refuse_views(seen, objects)

    @contextmanager
    def recomputation(self, before: Before | None) -> Iterator[None]:
        """Around the repeated run: what the first one saw, and then the values of now again.

        Without `before`, of a run that was not to be repeated, it begins with the values of now. Raises RuntimeError if
        it changes a tensor that has not been changed since the first run began.
        """
        now = self._values()
        objects_now = Snapshot(self._roots(now), lambda value: value)
        if before is None:
            with self.first_run() as before:
                pass
            kept: dict[Place, Any] = {}
        else:
            _refuse_other_weights(before.weights)
            now.update({place: place.value for place in before.values})
            kept = {place: value for place, value in before.values.items() if self._is_as_then(place, value)}
        copied = _Copied()
        with throwaway(statistics(self.modules)), _training(self.modules, before.training):
            for place in now.keys() - kept.keys():
                if place.module in before.modules:
                    place.put(copied(before.values.get(place, _ABSENT)))
            before.objects.put(copied.member)
            try:
                yield
                copies = [place for place, value in kept.items() if isinstance(value, _Copy)]
                late = [place for place in copies if not self._is_as_then(place, kept[place])]
            finally:
                for place in self._values().keys() - now.keys():
                    place.put(_ABSENT)
                for place, value in now.items():
                    place.put(value)
                objects_now.put(lambda value: value)
        if late:
            raise RuntimeError(
                f"a recomputation changes {late[0]}, and its first run has not: they do not compute the same "
                "-> checkpoint='never'"
            )

    def _stateful(self) -> list[nn.Module]:
        """The modules that may have state now."""
        return [
            *self._watched,
            *(one for one in self._others if one._buffers or one._forward_hooks or one._forward_pre_hooks),
        ]

    def _values(self) -> dict[Place, Any]:
        return {place: value for module in self._stateful() for place, value in _state(module)}

    def _roots(self, values: dict[Place, Any]) -> Iterator[tuple[str, Any]]:
        """What may lead to other objects: values that are there now, and hooks."""
        yield from ((str(place), value) for place, value in values.items() if not isinstance(value, LEAVES))
        yield from (root for module in self._stateful() for root in _hook_roots(module))

    def too_large(self) -> str | None:
        """Which attribute or hook leads to more objects than `first_run` looks at."""
        try:
            Snapshot(self._roots(self._values()), lambda value: value)
        except TooMany as error:
            return error.name
        return None

    def _is_as_then(self, place: Place, value: Any) -> bool:
        if isinstance(value, _Copy):
            versioned = place not in self._unversioned and not isinstance(place.module, _BatchNorm)
            return versioned and value.is_of(place.value)
        now = place.value
        return now is value or (type(now) is type(value) and isinstance(now, SCALARS) and bool(now == value))

    def _kept(self, value: Any, place: Place | None, known: dict[int, _Copy]) -> Any:
        """What a recomputation needs of a value; of a tensor that has not changed, the copy that is there."""
        if isinstance(value, ITERATORS):
            return Frozen.of(value)
        if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
            return value
        if id(value) not in self._copies:
            copy, fresh = known.get(id(value)), place in self._unversioned
            fresh |= place is not None and isinstance(place.module, _BatchNorm)
            self._copies[id(value)] = _Copy.of(value) if fresh or copy is None or not copy.is_of(value) else copy
        return self._copies[id(value)]

    def _learn(self, before: dict[Place, Any]) -> None:
        """After a first run: which tensors change without a new version, by native kernels or by their data. On a GPU,
        where that waits, only after the first one of each mode."""
        for place, value in before.items():
            if not isinstance(value, _Copy) or place in self._unversioned or value.value.is_meta:
                continue
            waits = value.value.device.type != "cpu" and (place.module, place.module.training) in self._compared
            if not waits and value.is_of(place.value) and not torch.equal(value.tensor, value.value):
                self._unversioned.add(place)
        self._compared |= {(module, module.training) for module in self._watched}

    def _refuse_views(self, before: dict[Place, Any], objects: Snapshot) -> None:
        """After a first run: RuntimeError if it has changed memory that several tensors or arrays show, of which a
        recomputation would get separate copies."""
        copies = [(place, value) for place, value in before.items() if isinstance(value, _Copy)]
        tensors = [(place, value, _memory(value.tensor)) for place, value in copies]
        holders: dict[int, dict[int, Tensor]] = {}
        for _, value, memory in tensors:
            holders.setdefault(memory, {})[id(value.tensor)] = value.tensor
        for array in objects.changed_arrays():
            if array.__array_interface__["data"][0] in holders:
                raise RuntimeError(_VIEW.format(f"a NumPy array of {self.where}"))
        for place, value, memory in tensors:
            sharing = [one for one in holders[memory].values() if one is not value.tensor]
            if not any(overlap(value.tensor, one) for one in sharing):
                continue
            if version(value.tensor) != value.version or not torch.equal(value.tensor, value.value):
                raise RuntimeError(_VIEW.format(place))


class _Copied:
    """What a recomputation may change of what is kept; of a tensor in several places one copy."""

    def __init__(self) -> None:
        self._tensors: dict[int, Tensor] = {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, Frozen):
            return value.thawed()
        if not isinstance(value, _Copy):
            return value
        if id(value) not in self._tensors:
            self._tensors[id(value)] = value.value.clone()
        return self._tensors[id(value)]

    def member(self, value: Any) -> Any:
        """The same of a member of an object: a tensor that has not changed is there itself."""
        if isinstance(value, _Copy) and id(value) not in self._tensors and value.is_of(value.tensor):
            return value.tensor
        return self(value)


def _plain_norm(module: nn.Module) -> bool:
    """A batch norm whose outputs in training do not depend on its buffers: torch's own, and the deferred one."""
    own = isinstance(module, DeferredBatchNorm) or type(module).__module__.startswith("torch.nn.")
    return isinstance(module, _BatchNorm) and own


def _of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.modules.")


def _stateless(module: nn.Module) -> bool:
    """A layer of torch's own without buffers: none of them remembers anything in its attributes."""
    return _of_torch(module) and not any(isinstance(value, Tensor) for _, value in _state(module))


def _state(module: nn.Module) -> Iterator[tuple[Place, Any]]:
    for name, buffer in module._buffers.items():
        yield Place(module, name, True), buffer
    for name, value in vars(module).items():
        if name not in _OF_EVERY_MODULE:
            yield Place(module, name, False), value


def _hook_roots(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        yield f"a forward hook of {type(module).__name__}", hook


def _memory(tensor: Tensor) -> int:
    """Where the memory of a tensor begins; of one that has none, a number of its own."""
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return -id(tensor)
    return tensor.untyped_storage().data_ptr()


def _parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Those with a value: lazy ones get theirs in the first forward pass."""
    for name, parameter in module._parameters.items():
        if parameter is not None and not is_lazy(parameter):
            yield name, parameter


def _refuse_other_weights(weights: Iterable[_Weight]) -> None:
    for one in weights:
        if not one.is_now(one.module._parameters.get(one.name)):
            raise RuntimeError(
                f"the parameter {one} has changed between a forward pass and its recomputation, which needs the "
                "weights of then -> change weights after the backward pass, or checkpoint='never'"
            )


@contextmanager
def _training(modules: Iterable[nn.Module], then: Iterable[bool]) -> Iterator[None]:
    """Modules train, or do not, as then."""
    changed = [
        (module, module.training) for module, flag in zip(modules, then, strict=False) if module.training != flag
    ]
    for module, now in changed:
        module.training = not now
    try:
        yield
    finally:
        for module, now in changed:
            module.training = now


_OF_EVERY_MODULE = frozenset((*vars(nn.Module()), "_compiled_call_impl"))
