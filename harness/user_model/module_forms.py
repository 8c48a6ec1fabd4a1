"""Modules in forms that only their process can have: what wraps them, and classes that torch makes for one module.

torch.compile(net), nn.DataParallel(net)   ->  net         engines compile layers, and copy them, by themselves
weight_norm(nn.Linear(3, 4))               ->  nn.Linear with its parametrizations, which pickle does not take

Importing this module imports torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import cloudpickle
from torch import nn
from torch.nn.utils import parametrize


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that torch.compile or nn.DataParallel has wrapped, or itself."""
    while (inner := _inner(module)) is not None:
        module = inner
    return module


def unwrap_inside(module: nn.Module) -> None:
    """Put the modules of a module in the place of what wraps them, and let calls of compiled ones be plain ones."""
    for each in module.modules():
        each._compiled_call_impl = None
        for name, child in each._modules.items():
            if child is not None:
                each._modules[name] = unwrapped(child)


def _inner(module: Any) -> nn.Module | None:
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo and isinstance(module, dynamo.OptimizedModule):
        found: nn.Module = module._orig_mod
        return found
    return module.module if isinstance(module, nn.DataParallel) else None


class _Pickler(cloudpickle.Pickler):
    """Pickles what is wrapped, and parametrized modules, whose classes each are one module's."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            if _inner(value) is not None:
                return _itself, (unwrapped(value),)
            if parametrize.is_parametrized(value):
                kind = parametrize.type_before_parametrizations(value)
                names = [*value.parametrizations]  # type: ignore[misc]
                return _parametrized, (kind, names), vars(value) | {"_compiled_call_impl": None}
        return super().reducer_override(value)


PICKLING = SimpleNamespace(__name__="cloudpickle", Pickler=_Pickler)
"""What torch.save takes as the module that pickles."""


def _itself(module: nn.Module) -> nn.Module:
    return module


def _parametrized(kind: type[nn.Module], names: Sequence[str]) -> nn.Module:
    """A module without attributes, of a class of its own in which these tensors are computed."""
    module = kind.__new__(kind)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module
