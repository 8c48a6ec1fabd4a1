"""State that a forward pass changes in the layers: a recomputation sees what the first run saw, and changes nothing.

    first runs       buffer b0 --F0--> b1 --F1--> b1 --F2--> b2      copies of b0 and b1 stay
    recomputations   R2 and R1 get b1 in its place, R0 gets b0; afterwards the module has b2 again

Every buffer has a copy before a first run, so that the value is there also where a change comes unexpectedly. As long
as the buffer does not change, all tasks share that copy. Batch norms need none: what they compute in training does not
depend on their running statistics.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from harness.nn.batchnorm import DeferredBatchNorm, statistics, throwaway
from harness.nn.tied import version

SCALARS = (bool, int, float, str, type(None))
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
class Before:
    """State that a task saw in its first run: plain values, and tensors as `_Copy`. State that is missing here is
    newer."""

    modules: list[nn.Module]
    values: dict[Place, Any]


class ForwardState:
    """The state of some modules around first runs and recomputations; one thread at a time makes them.

    State is buffers and tensors that are plain attributes, and the plain numbers, texts and flags of modules that hold
    such tensors or that change them in the first run. A frozen parameter that the forward pass changes is refused.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules = list(dict.fromkeys(modules))
        self._watched = [module for module in self.modules if not _plain_norm(module)]
        self._others: list[nn.Module] = []  # modules without tensors, which have changed nothing
        self._learned = False
        self._copies: dict[Place, _Copy] = {}
        self._compared: set[tuple[nn.Module, bool]] = set()
        self._unversioned: set[Place] = set()

    def __getstate__(self) -> list[nn.Module]:
        """A copy begins like a new one."""
        return self.modules

    def __setstate__(self, modules: list[nn.Module]) -> None:
        self.__init__(modules)  # type: ignore[misc]

    @contextmanager
    def first_run(self) -> Iterator[Before]:
        """Around a run that will be repeated; what is yielded is for its recomputation."""
        values = self._values()
        seen = {place: self._copy(place, v) if isinstance(v, Tensor) else v for place, v in values.items()}
        frozen = [(module, *pair, version(pair[1])) for module in self.modules for pair in _frozen(module)]
        yield Before(self._stateful(), seen)
        for module, name, parameter, before in frozen:
            if version(parameter) != before:
                raise RuntimeError(
                    f"the forward pass changes the frozen parameter {name!r} of {type(module).__name__}, and its "
                    "recomputation would change it again -> make it a buffer, or checkpoint='never'"
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
            tensors = {place: _Copy.of(value) for place, value in now.items() if isinstance(value, Tensor)}
            before = Before(self._stateful(), now | tensors)
            kept: dict[Place, Any] = {}
        else:
            now.update({place: place.value for place in before.values})
            kept = {place: value for place, value in before.values.items() if self._is_as_then(place, value)}
        with throwaway(statistics(self.modules)):
            for place in now.keys() - kept.keys():
                if place.module in before.modules:
                    value = before.values.get(place, _ABSENT)
                    place.put(value.value.clone() if isinstance(value, _Copy) else value)
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
        return now is value or (type(now) is type(value) and bool(now == value))

    def _copy(self, place: Place, tensor: Tensor) -> _Copy:
        known = self._copies.get(place)
        if known is None or not known.is_of(tensor) or place in self._unversioned:
            known = self._copies[place] = _Copy.of(tensor)
        return known

    def _learn(self, before: dict[Place, Any]) -> None:
        """After a first run: which tensors change without a new version, as native kernels may do, in modules that ran
        for the first time in this mode; after the first one in training, which modules have state at all."""
        for place, value in before.items():
            if isinstance(value, _Copy) and (place.module, place.module.training) not in self._compared:
                now = place.value
                if value.is_of(now) and not now.is_meta and not torch.equal(now, value.value):
                    self._unversioned.add(place)
        if not self._learned and any(module.training for module in self.modules):
            self._learned = True
            after = self._values()
            stateful = {place.module for place, value in after.items() if isinstance(value, Tensor)}
            places = before.keys() | after.keys()
            stateful |= {p.module for p in places if p not in before or not self._is_as_then(p, before[p])}
            self._others = [module for module in self._watched if module not in stateful]
            self._watched = [module for module in self._watched if module in stateful]
        self._compared |= {(module, module.training) for module in self._watched}


def _plain_norm(module: nn.Module) -> bool:
    """A batch norm whose outputs in training do not depend on its buffers: torch's own, and the deferred one."""
    own = isinstance(module, DeferredBatchNorm) or type(module).__module__.startswith("torch.nn.")
    return isinstance(module, _BatchNorm) and own


def _state(module: nn.Module) -> Iterator[tuple[Place, Any]]:
    for name, buffer in module._buffers.items():
        yield Place(module, name, True), buffer
    for name, value in vars(module).items():
        if isinstance(value, (*SCALARS, Tensor)) and name not in _OF_EVERY_MODULE:
            yield Place(module, name, False), value


def _frozen(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in module._parameters.items():
        if parameter is not None and not parameter.requires_grad:
            yield name, parameter


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
