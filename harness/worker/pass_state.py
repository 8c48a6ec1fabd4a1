"""What forward passes leave in the modules of a process, and a session's state dict has not: for checkpoints.

    attributes   numbers, texts, tensors, and lists, tuples, dictionaries, sets and deques of these: `self.passes += 1`
    buffers      that are not persistent; with replicas all, of which a state dict has the mean

Only what has changed since training began counts. Tensors that require a gradient are left out, and what holds one: the
next pass makes others. So are objects of other kinds, which no checkpoint holds.
Importing this module imports torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from harness.capture.python_state import plain_attributes
from harness.capture.structure import Nest, built, template
from harness.nn.tied import version

PLAIN = (bool, int, float, complex, str, type(None))
NESTED = (list, tuple, dict)
LISTED = (set, deque)
"""Containers that are in a checkpoint as lists."""
OURS = ("engines.", "harness.")
CAPTURED = "harness.capture."
"""Whose modules have attributes of the user's, while those of our others are their own."""


@dataclass(frozen=True, eq=False)
class _Seen:
    """An object as it was, a tensor in its version."""

    one: Any
    version: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Seen) and self.one is other.one and self.version == other.version


class PassState:
    """Of the modules in `stage`, from now on. `replicas`: other processes have the same ones."""

    def __init__(self, stage: nn.Module | None = None, replicas: bool = False) -> None:
        self._modules = dict(stage.named_modules()) if stage is not None else {}
        self._replicas = replicas
        self._begun = {(path, name): _form(value) for path, name, value in self._values()}

    def changed(self) -> dict[str, dict[str, Any]]:
        """What has changed, by path of the module and name, with copies of its tensors on the CPU."""
        found: dict[str, dict[str, Any]] = {}
        copies: dict[int, Tensor] = {}

        def copied(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return copies.setdefault(id(leaf), leaf.detach().cpu().clone())
            return leaf

        for path, name, value in self._values():
            if (path, name) not in self._begun or self._begun[path, name] != _form(value):
                form = template(_listed(value), _itself)
                if _can_be_stored(form):
                    found.setdefault(path, {})[name] = built(form, copied)
        return found

    def put(self, saved: dict[str, dict[str, Any]]) -> None:
        """Let modules have again what was `changed`, tensors on their device, or that of the others."""
        placed: dict[int, Tensor] = {}
        for path, values in saved.items():
            module = self._modules[path]
            device = next(chain(_devices(module), *map(_devices, self._modules.values())), None)

            def own(leaf: Any, device: Any = device) -> Any:
                if isinstance(leaf, Tensor):
                    return placed.setdefault(id(leaf), leaf.to(device=device, copy=True))
                return leaf

            for name, value in values.items():
                table: Any = module._buffers if name in module._buffers else vars(module)
                now, again = table.get(name), built(template(value, own), _itself)
                table[name] = _written(now, again) if table is module._buffers else _in_place(now, again)

    def _values(self) -> Iterator[tuple[str, str, Any]]:
        """Path, name and value of all that counts if it changes."""
        for path, module in self._modules.items():
            kind = f"{type(module).__module__}."
            if kind.startswith(OURS) and not kind.startswith(CAPTURED):
                continue
            for name, buffer in module._buffers.items():
                if self._replicas or name in module._non_persistent_buffers_set:
                    yield path, name, buffer
            for name, value in plain_attributes(module).items():
                yield path, name, value


def _form(value: Any) -> Any:
    """What is equal to that of the same value later, unless it has changed."""
    return template(_listed(value), lambda leaf: leaf if type(leaf) in PLAIN else _Seen(leaf, _version(leaf)))


def _version(value: Any) -> int:
    return version(value) if isinstance(value, Tensor) else 0


def _listed(value: Any) -> Any:
    return list(value) if type(value) in LISTED else value


def _can_be_stored(form: Any) -> bool:
    if isinstance(form, Nest):
        keys = template(form.keys or (), _itself)
        return form.kind in NESTED and all(map(_can_be_stored, (*keys.items, *form.items)))
    return type(form) in PLAIN or (type(form) is Tensor and not form.requires_grad)


def _devices(module: nn.Module) -> Iterator[torch.device]:
    return (one.device for one in chain(module.parameters(), module.buffers()))


def _written(now: Any, value: Any) -> Any:
    """A buffer that is there now, of which there may be views, with what the value holds; or the value."""
    tensors = isinstance(now, Tensor) and isinstance(value, Tensor)
    if tensors and (now.shape, now.dtype) == (value.shape, value.dtype) and not now.requires_grad:
        with torch.no_grad():
            return now.copy_(value)
    return value


def _in_place(now: Any, value: Any) -> Any:
    """The container that is there now, which other objects may have, too, with what the value holds; or the value."""
    if type(now) in (list, dict, *LISTED) and type(value) is (list if type(now) in LISTED else type(now)):
        now.clear()
        (now.extend if isinstance(now, list | deque) else now.update)(value)
        return now
    return value


def _itself(value: Any) -> Any:
    return value
