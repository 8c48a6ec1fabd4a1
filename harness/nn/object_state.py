"""What objects among the attributes of modules hold: containers in containers, plain objects, closures, random numbers.

    first run       objects that can be reached from the attributes, and what each of them holds
    recomputation   each holds that again, in place, so that whoever has the object sees it; afterwards what it held

Not followed are global names but containers that a hook names, attributes of classes, and what the standard library,
torch and extensions make: loggers, locks, process groups, values of one thread.
"""

from __future__ import annotations

import copy
import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

OBJECTS = 10_000
"""The most objects that an attribute may have."""
SCALARS = (bool, int, float, complex, str, bytes, type(None), frozenset, type, ModuleType, torch.dtype, torch.device)
ENDS = (*SCALARS, Tensor, nn.Module)
"""What is not followed."""
ITERATORS: tuple[type, ...] = (itertools.count, itertools.cycle, type(iter([])), type(iter(())), type(iter(range(0))))
CONTAINERS = (list, dict, set, deque)
RANDOM = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
LIBRARIES = {"torch", "numpy", "omegaconf", "deepspeed"}
"""Packages whose containers are not followed either: DeepSpeed's registries are dictionaries."""
FOREIGN = sys.stdlib_module_names - {"__main__"} | LIBRARIES
"""Packages whose objects are not followed."""


@dataclass(frozen=True)
class Frozen:
    """An iterator as it was: it cannot be set back, so its holder gets a copy of this one."""

    iterator: Any

    @classmethod
    def of(cls, iterator: Any) -> Frozen:
        return cls(copy.copy(iterator))

    def thawed(self) -> Any:
        return copy.copy(self.iterator)


@dataclass(frozen=True)
class Held:
    """What an object holds: members, of dicts and attributes with `keys`; or numbers, `data`."""

    members: tuple[Any, ...] = ()
    keys: tuple[Any, ...] | None = None
    data: Any = None

    @classmethod
    def by_name(cls, items: dict[Any, Any]) -> Held:
        return cls(tuple(items.values()), tuple(items))

    def mapped(self, function: Callable[[Any], Any]) -> Held:
        return Held(tuple(map(function, self.members)), self.keys, self.data)

    def equals(self, other: Held) -> bool:
        """Whether it is the same objects under the same keys, and the same data."""
        if self.data is not None:
            return _same_data(self.data, other.data)
        mine, others = ((*(held.keys or ()), *held.members) for held in (self, other))
        return len(mine) == len(others) and all(a is b for a, b in zip(mine, others, strict=True))


class TooMany(RuntimeError):
    """A value that leads to more objects than can be looked at in each recomputation; `name` says which."""

    def __init__(self, name: str, most: float) -> None:
        self.name = name
        super().__init__(
            f"{name} has more than {most} objects, too many to look at in each recomputation "
            "-> checkpoint='never', or keep them outside of the module"
        )


class Snapshot:
    """What the objects that can be reached from `roots`, values with their names, hold now.

    `freeze` makes of each member what is kept of it. Raises `TooMany` if a root has more than `most` objects, by
    default OBJECTS.
    """

    def __init__(
        self, roots: Iterable[tuple[str, Any]], freeze: Callable[[Any], Any], most: float | None = None
    ) -> None:
        most = OBJECTS if most is None else most
        self.held: dict[int, tuple[Any, Held]] = {}
        for name, root in roots:
            waiting, limit = [root], len(self.held) + most
            while waiting:
                one = waiting.pop()
                if isinstance(one, ENDS) or id(one) in self.held:
                    continue
                held = _held(one)
                if held is None:
                    waiting += _parts(one)
                    continue
                self.held[id(one)] = one, held.mapped(freeze)
                waiting += held.members
                if len(self.held) > limit:
                    raise TooMany(name, most)

    def put(self, thaw: Callable[[Any], Any]) -> None:
        """Every object holds again what it held; one that holds it still is left alone."""
        for one, kept in self.held.values():
            now, wanted = _held(one), kept.mapped(thaw)
            if now is None or not now.equals(wanted):
                _write(one, wanted)

    def changed_arrays(self) -> list[np.ndarray[Any, Any]]:
        """The NumPy arrays that hold something else now."""
        pairs = ((one, kept.data) for one, kept in self.held.values() if isinstance(one, np.ndarray))
        return [one for one, data in pairs if not _same_data(one, data)]


def hidden_modules(roots: Iterable[Any]) -> list[nn.Module]:
    """The modules that objects hold, with their submodules: those that torch does not know."""
    held = [one for one in reachable(roots) if isinstance(one, nn.Module)]
    return list(dict.fromkeys(module for one in held for module in one.modules()))


def reachable(roots: Iterable[Any], functions: bool = True) -> Iterator[Any]:
    """The changeable objects, tensors and modules that values lead to, themselves among them, each once; those that
    are found among the first OBJECTS. Through functions only if asked."""
    seen: dict[int, Any] = {}
    waiting, followed = list(roots), 0
    while waiting and followed < OBJECTS:
        one = waiting.pop()
        if isinstance(one, SCALARS) or id(one) in seen or (isinstance(one, FunctionType) and not functions):
            continue
        seen[id(one)] = one
        if isinstance(one, ENDS):
            yield one
            continue
        followed += 1
        if (held := _held(one)) is None:
            waiting += _parts(one)
        else:
            yield one
            waiting += held.members


def _held(one: Any) -> Held | None:
    """What a changeable object holds; None of all others."""
    if isinstance(one, CONTAINERS) and type(one).__module__.partition(".")[0] in LIBRARIES:
        return None
    if isinstance(one, dict):
        return Held.by_name(one)
    if isinstance(one, CONTAINERS):
        return Held(tuple(one))
    if isinstance(one, CellType):
        try:
            return Held((one.cell_contents,))
        except ValueError:  # empty
            return None
    if isinstance(one, np.ndarray):
        return Held(data=one.copy())
    if isinstance(one, RANDOM):
        return Held(data=_random_state(one))
    return Held.by_name(_attributes(one)) if _is_plain(one) else None


def _parts(one: Any) -> list[Any]:
    """What can be reached from an object that does not change itself."""
    if isinstance(one, tuple):
        return list(one)
    if isinstance(one, MethodType):
        return [one.__self__, one.__func__]
    if isinstance(one, partial):
        return [one.func, *one.args, *one.keywords.values()]
    if isinstance(one, FunctionType):
        return (
            []
            if _is_foreign(one.__module__)
            else [
                *(one.__closure__ or ()),
                *(one.__defaults__ or ()),
                vars(one),
                *global_containers(one).values(),
            ]
        )
    return []


def global_containers(function: FunctionType) -> dict[str, Any]:
    """The global lists, dicts and sets that a function names."""
    names = function.__code__.co_names
    found = {name: function.__globals__[name] for name in names if name in function.__globals__}
    return {name: value for name, value in found.items() if isinstance(value, CONTAINERS)}


def _is_plain(one: Any) -> bool:
    """An object of a class of the user's, whose attributes are its state."""
    kind = type(one)
    if isinstance(one, SimpleNamespace):
        return True
    if isinstance(one, (FunctionType, MethodType, partial, tuple, *ITERATORS)):
        return False
    return not _is_foreign(kind.__module__) and (hasattr(one, "__dict__") or bool(_slots(kind)))


def _is_foreign(module: str | None) -> bool:
    """Whether a class or a function of this module is a library's own; torch.nn has the user's layers."""
    package, _, rest = (module or "").partition(".")
    return package in FOREIGN and not (package == "torch" and rest.startswith("nn."))


def _slots(kind: type) -> list[str]:
    found: list[str] = []
    for base in kind.__mro__:
        own = vars(base).get("__slots__", ())
        found += [own] if isinstance(own, str) else list(own)
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def _attributes(one: Any) -> dict[str, Any]:
    found = dict(getattr(one, "__dict__", {}))
    for name in _slots(type(one)):
        with suppress(AttributeError):
            found[name] = getattr(one, name)
    return found


def _write(one: Any, held: Held) -> None:
    if isinstance(one, dict):
        one.clear()
        for key, member in zip(held.keys or (), held.members, strict=True):
            one[key] = member  # a Counter's update adds
    elif isinstance(one, deque):
        one.clear()
        one.extend(held.members)
    elif isinstance(one, set):
        one.clear()
        one.update(held.members)
    elif isinstance(one, list):
        one[:] = held.members
    elif isinstance(one, CellType):
        (one.cell_contents,) = held.members
    elif isinstance(one, np.ndarray):
        one[...] = held.data
    elif isinstance(one, RANDOM):
        _set_random_state(one, held.data)
    else:
        _write_attributes(one, dict(zip(held.keys or (), held.members, strict=True)))


def _write_attributes(one: Any, wanted: dict[str, Any]) -> None:
    for name in _attributes(one).keys() - wanted.keys():
        object.__delattr__(one, name)
    for name, value in wanted.items():
        object.__setattr__(one, name, value)


def _random_state(one: Any) -> Any:
    if isinstance(one, torch.Generator):
        return one.get_state()
    if isinstance(one, random.Random):
        return one.getstate()
    return one.get_state() if isinstance(one, np.random.RandomState) else copy.deepcopy(one.bit_generator.state)


def _set_random_state(one: Any, state: Any) -> None:
    if isinstance(one, (torch.Generator, np.random.RandomState)):
        one.set_state(state)
    elif isinstance(one, random.Random):
        one.setstate(state)
    else:
        one.bit_generator.state = state


def _same_data(now: Any, then: Any) -> bool:
    if isinstance(now, Tensor):
        return torch.equal(now, then)
    if isinstance(now, np.ndarray):
        return now.shape == then.shape and now.tobytes() == then.tobytes()
    return repr(now) == repr(then)
