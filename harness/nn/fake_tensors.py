"""What passes on fake tensors, which have no memory, leave outside of modules.

masks = {}                       a cache of a class, of a file, or of a function: a pass on fake tensors fills it,
@functools.lru_cache             and the next pass for real would compute with tensors that have no values

with leaving_none(module):       afterwards such tensors are gone from there
    ...                          passes of the module
"""

from __future__ import annotations

import functools
import gc
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from harness.nn.object_state import SCALARS

DEEPEST = 4
"""Containers in containers that are looked into."""
INSTALLED = (str(Path(torch.__file__).parents[1]), str(Path(functools.__file__).parent))
"""Folders of libraries, whose files matter where a class of a module is in them."""


@contextmanager
def leaving_none(module: nn.Module) -> Iterator[None]:
    """Around passes of a module on fake tensors.

    Looked through are the classes of the module's parts, their files, the user's files that these import, and the
    objects of the user's classes there. Entries of containers are taken out, caches of functions are cleared,
    attributes are as they were. What closures hold stays.
    """
    before = [(owner, dict(vars(owner))) for owner in _owners(module)]
    try:
        yield
    finally:
        for owner, was in before:
            _restore(owner, was)


def _owners(module: nn.Module) -> list[Any]:
    """Classes, files and objects."""
    kinds = {kind for one in module.modules() for kind in type(one).__mro__ if not _is_torchs(kind.__module__)}
    files = {sys.modules[kind.__module__] for kind in kinds if kind.__module__ in sys.modules}
    files |= {one for file in files for one in vars(file).values() if isinstance(one, ModuleType) and _is_users(one)}
    places = [*kinds, *files]
    objects = [one for place in places for one in vars(place).values() if _is_object(one)]
    return [*places, *objects]


def _is_torchs(name: str) -> bool:
    return name.partition(".")[0] in ("torch", "builtins", "abc", "typing")


def _is_users(file: ModuleType) -> bool:
    return not str(getattr(file, "__file__", None) or INSTALLED[0]).startswith(INSTALLED)


def _is_object(value: Any) -> bool:
    """Whether it is an object of a class of the user's."""
    if isinstance(value, (nn.Module, type, *SCALARS)) or not hasattr(value, "__dict__"):
        return False
    file = sys.modules.get(type(value).__module__)
    return file is not None and _is_users(file)


def _restore(owner: Any, was: dict[str, Any]) -> None:
    for name, value in list(vars(owner).items()):
        if isinstance(value, FakeTensor) or (isinstance(value, tuple) and _holds(value)):
            if name in was:
                setattr(owner, name, was[name])
            else:
                delattr(owner, name)
        else:
            _take_out(value)


def _take_out(value: Any, depth: int = 0) -> None:
    """Take fake tensors out of a container, or clear the cache of a function."""
    function = getattr(value, "__func__", value)  # of a static method
    if isinstance(function, functools._lru_cache_wrapper):
        if _holds(tuple(gc.get_referents(function))):
            function.cache_clear()
    elif isinstance(value, dict):
        for key in [key for key, one in value.items() if _holds(one, depth)]:
            del value[key]
    elif isinstance(value, list | deque):
        kept = [one for one in value if not _holds(one, depth)]
        if len(kept) < len(value):
            value.clear()
            value.extend(kept)
    elif isinstance(value, set):
        value.difference_update([one for one in value if isinstance(one, FakeTensor)])


def _holds(value: Any, depth: int = 0) -> bool:
    """Whether it is a fake tensor, or a container of one."""
    if isinstance(value, FakeTensor):
        return True
    if depth >= DEEPEST:
        return False
    if isinstance(value, dict):
        return any(_holds(one, depth + 1) for one in value.values())
    return isinstance(value, tuple | list | deque) and any(_holds(one, depth + 1) for one in value)
