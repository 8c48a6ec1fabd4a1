"""State that a forward pass changes in the layers: a recomputation sees what the first run saw, and changes nothing.
What cannot be put back so is noticed by the outputs (harness.runtime.output_check).

    first runs       buffer b0 --F0--> b1 --F1--> b1 --F2--> b2      copies of b0 and b1 stay
    recomputations   R2 and R1 get b1 in its place, R0 gets b0; afterwards the module has b2 again

Every buffer has a copy before a first run, so that the value is there also where a change comes unexpectedly. As long
as the buffer does not change, all tasks share that copy. Batch norms need none: what they compute in training does not
depend on their running statistics. Of a list, dict, set or deque among the attributes of a module the recomputation
gets a copy with the members of then. Layers of torch.nn without buffers have no state.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from harness.nn.batchnorm import DeferredBatchNorm, statistics, throwaway
from harness.nn.tied import version
from harness.runtime import output_check
from harness.runtime.output_check import Sample

SCALARS = (bool, int, float, complex, str, bytes, type(None), tuple, frozenset)
CONTAINERS = (list, dict, set, deque)
_ABSENT = object()


@dataclass(frozen=True)
class Place:
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
class _Members:
    """A container as it was; a shallow copy."""

    copied: Any


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
    """What a task saw in its first run: plain values, tensors as `_Copy`, containers as `_Members`; weights, and which
    modules trained. State that is missing here is newer. Then samples of its outputs."""

    where: str
    modules: list[nn.Module]
    values: dict[Place, Any]
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

    State is buffers, and among the attributes tensors, plain numbers, texts and flags, and containers. A parameter that
    the forward pass changes, or that is changed before the recomputation, is refused. `where` is for messages.
    """

    def __init__(self, modules: Iterable[nn.Module], where: str) -> None:
        self.modules = list(dict.fromkeys(modules))
        self.where = where
        self._watched = [module for module in self.modules if not _plain_norm(module) and not _stateless(module)]
        self._others = [module for module in self.modules if _stateless(module)]  # they may get buffers
        self._copies: dict[Place, _Copy] = {}
        self._compared: set[tuple[nn.Module, bool]] = set()
        self._unversioned: set[Place] = set()

    def __getstate__(self) -> tuple[list[nn.Module], str]:
        """A copy begins like a new one."""
        return self.modules, self.where

    def __setstate__(self, state: tuple[list[nn.Module], str]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    @contextmanager
    def first_run(self) -> Iterator[Before]:
        """Around a run that will be repeated; what is yielded is for its recomputation."""
        seen = {place: self._as_now(place, value) for place, value in self._values().items()}
        weights = [_Weight(module, *pair, version(pair[1])) for module in self.modules for pair in _parameters(module)]
        yield Before(self.where, self._stateful(), seen, weights, [module.training for module in self.modules])
        for one in weights:
            if version(one.parameter) != one.version:
                raise RuntimeError(
                    f"the forward pass changes the parameter {one}, and its recomputation would change it again "
                    "-> make it a buffer, or checkpoint='never'"
                )
        self._learn(seen)

    @contextmanager
    def recomputation(self, before: Before | None) -> Iterator[None]:
        """Around the repeated run: what the first one saw, and then the values of now again.

        Without `before`, of a run that was not to be repeated, it begins with the values of now. Raises RuntimeError if
        it changes a tensor that has not been changed since the first run began.
        """
        now = self._values()
        if before is None:
            before = Before(self.where, self._stateful(), {p: _as_then(value) for p, value in now.items()}, [], [])
            kept: dict[Place, Any] = {}
        else:
            _refuse_other_weights(before.weights)
            now.update({place: place.value for place in before.values})
            kept = {place: value for place, value in before.values.items() if self._is_as_then(place, value)}
        with throwaway(statistics(self.modules)), _training(self.modules, before.training):
            for place in now.keys() - kept.keys():
                if place.module in before.modules:
                    place.put(_copied(before.values.get(place, _ABSENT)))
            try:
                yield
                copies = [place for place, value in kept.items() if isinstance(value, _Copy)]
                late = [place for place in copies if not self._is_as_then(place, kept[place])]
            finally:
                for place in self._values().keys() - now.keys():
                    place.put(_ABSENT)
                for place, value in now.items():
                    place.put(value)
        if late:
            raise RuntimeError(
                f"a recomputation changes {late[0]}, and its first run has not: they do not compute the same "
                "-> checkpoint='never'"
            )

    def _stateful(self) -> list[nn.Module]:
        """The modules that may have state now."""
        return [*self._watched, *(module for module in self._others if module._buffers)]

    def _values(self) -> dict[Place, Any]:
        return {place: value for module in self._stateful() for place, value in _state(module)}

    def _is_as_then(self, place: Place, value: Any) -> bool:
        if isinstance(value, _Copy):
            versioned = place not in self._unversioned and not isinstance(place.module, _BatchNorm)
            return versioned and value.is_of(place.value)
        now = place.value
        return now is value or (type(now) is type(value) is not tuple and bool(now == value))

    def _as_now(self, place: Place, value: Any) -> Any:
        """The value for a recomputation; of a tensor that has not changed, the copy that is there."""
        if not isinstance(value, Tensor):
            return _as_then(value)
        known = self._copies.get(place)
        if known is None or not known.is_of(value) or place in self._unversioned:
            known = self._copies[place] = _Copy.of(value)
        return known

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


def _plain_norm(module: nn.Module) -> bool:
    """A batch norm whose outputs in training do not depend on its buffers: torch's own, and the deferred one."""
    own = isinstance(module, DeferredBatchNorm) or type(module).__module__.startswith("torch.nn.")
    return isinstance(module, _BatchNorm) and own


def _stateless(module: nn.Module) -> bool:
    """A layer of torch's own without buffers: none of them remembers anything in its attributes."""
    return type(module).__module__.startswith("torch.nn.modules.") and not any(True for _ in _state_tensors(module))


def _state_tensors(module: nn.Module) -> Iterator[Tensor]:
    return (value for _, value in _state(module) if isinstance(value, Tensor))


def _state(module: nn.Module) -> Iterator[tuple[Place, Any]]:
    for name, buffer in module._buffers.items():
        yield Place(module, name, True), buffer
    for name, value in vars(module).items():
        if name not in _OF_EVERY_MODULE and isinstance(value, (*SCALARS, *CONTAINERS, Tensor)):
            yield Place(module, name, False), value


def _parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Those with a value: lazy ones get theirs in the first forward pass."""
    for name, parameter in module._parameters.items():
        if parameter is not None and not is_lazy(parameter):
            yield name, parameter


def _as_then(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Copy.of(value)
    return _Members(copy.copy(value)) if isinstance(value, CONTAINERS) else value


def _copied(value: Any) -> Any:
    """What a recomputation may change."""
    if isinstance(value, _Copy):
        return value.value.clone()
    return copy.copy(value.copied) if isinstance(value, _Members) else value


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


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
