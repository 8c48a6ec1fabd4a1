"""Skip connections, independent of engines: a layer stashes a tensor under a name, a later layer pops it.

    class Remember(Skippable):                      class Join(Skippable):
        stashes = ("shortcut",)                         pops = ("shortcut",)
        def forward(self, x):                           def forward(self, x):
            self.stash("shortcut", x)                       return x + self.pop("shortcut")
            return x

A plain `nn.Sequential` of such layers runs as it is. An engine that splits the sequence runs each stage under
`carried`, which passes in the skips that arrive and returns those that leave. `Sum`, the end of a residual branch, is a
module, so that an engine that splits layers can find it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


class Sum(nn.Module):
    """Adds the input of a residual branch to its output."""

    def forward(self, past: Tensor, branch: Tensor) -> Tensor:
        return past + branch


class Skippable(nn.Module):
    """A layer that stashes or pops. Names are unique within a `namespace`, so that a block can be repeated."""

    stashes: tuple[str, ...] = ()
    pops: tuple[str, ...] = ()
    namespace: str = ""

    def key(self, name: str) -> str:
        """Returns the name of a skip in the whole model."""
        return f"{self.namespace}/{name}" if self.namespace else name

    def stash(self, name: str, tensor: Tensor | None) -> None:
        """Keeps `tensor` for the layer that pops `name`."""
        if not isinstance(tensor, Tensor | None):
            raise TypeError(
                f"{type(self).__name__} stashes a {type(tensor).__name__} as {name!r}, not a tensor or None"
            )
        if name not in self.stashes:
            raise ValueError(f"{type(self).__name__} stashes {name!r} but declares only {list(self.stashes)}")
        _current()[self.key(name)] = tensor

    def pop(self, name: str) -> Any:
        """Returns the tensor (or None) that was stashed as `name`, and removes it."""
        if name not in self.pops:
            raise ValueError(f"{type(self).__name__} pops {name!r} but declares only {list(self.pops)}")
        key = self.key(name)
        if key not in _current():
            raise LookupError(
                f"{type(self).__name__} pops {key!r}, but no layer stashed it: {sorted(_current())} are here"
            )
        return _current().pop(key)


def stashed(layer: nn.Module) -> list[Tensor]:
    """What a layer has stashed in the current pass, until it is popped."""
    return list(_stashed(layer).values())


def change_stashed(layer: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Have what a layer has stashed be another tensor."""
    _current().update({name: change(tensor) for name, tensor in _stashed(layer).items()})


def _stashed(layer: nn.Module) -> dict[str, Tensor]:
    """By their names; the modules of a layer are looked through only if anything is stashed."""
    parts = [module for module in layer.modules() if isinstance(module, Skippable)] if _current() else []
    names = [part.key(name) for part in parts for name in part.stashes]
    return {name: tensor for name in names if isinstance(tensor := _current().get(name), Tensor)}


def waiting() -> list[Tensor]:
    """What is stashed and not popped yet in the current pass."""
    return [tensor for tensor in _current().values() if isinstance(tensor, Tensor)]


class Stash(Skippable):
    """Passes its input on, and keeps it as `name`: for skips that no later layer changes in place."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.stashes = (name,)

    def forward(self, x: Tensor) -> Tensor:
        self.stash(self.stashes[0], x)
        return x


def isolate(module: nn.Module, namespace: str) -> nn.Module:
    """Puts every skip of `module` into `namespace`; returns the module, so that it can be used in place."""
    for layer in module.modules():
        if isinstance(layer, Skippable):
            layer.namespace = f"{namespace}/{layer.namespace}" if layer.namespace else namespace
    return module


class _Store(threading.local):
    def __init__(self) -> None:
        self.skips: dict[str, Tensor | None] = {}


_store = _Store()


def _current() -> dict[str, Tensor | None]:
    return _store.skips


@contextmanager
def carried(incoming: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Runs layers with the skips `incoming`; the dict that is yielded ends with those that were not popped."""
    outer, _store.skips = _store.skips, dict(incoming)
    try:
        yield _store.skips
    finally:
        _store.skips = outer


def named_layers(sequence: nn.Sequential) -> list[tuple[str, nn.Module]]:
    """Returns the layers in order. Different `named_children` it keeps a layer that is in several places."""
    return [(name, layer) for name, layer in sequence._modules.items() if layer is not None]


@dataclass(frozen=True)
class LayerSkip:
    """A skip of a sequence: stashed by layer `source`, popped by layer `target` (0-based)."""

    name: str
    source: int
    target: int


def frozen_prefix(layers: Iterable[tuple[str, nn.Module]]) -> int:
    """How many layers come before all that are trained, if any of them has weights: no gradient reaches them. As
    `ModelProfile.frozen_prefix`."""
    has_weights = False
    for number, (_, layer) in enumerate(layers):
        weights = [*layer.parameters()]
        if any(weight.requires_grad for weight in weights):
            return number if has_weights else 0
        has_weights = has_weights or bool(weights)
    return 0


def layer_skips(layers: Iterable[tuple[str, nn.Module]]) -> list[LayerSkip]:
    """Returns the skips of a sequence of named layers, by source; a layer's own stash and pop do not count.

    Raises ValueError, naming the layers, for a stash without a pop, a pop without a stash, a pop that comes first,
    and a name that is stashed or popped twice in one namespace.
    """
    stashed: dict[str, tuple[int, str]] = {}
    popped: set[str] = set()
    skips, problems = [], []
    for index, (layer_name, layer) in enumerate(layers):
        for module in layer.modules():
            if not isinstance(module, Skippable):
                continue
            for name in map(module.key, module.pops):
                if name in popped:
                    problems.append(f"layer {layer_name!r} pops {name!r}, which an earlier layer pops")
                elif name not in stashed:
                    problems.append(f"layer {layer_name!r} pops {name!r}, which no earlier layer stashes")
                elif stashed[name][0] != index:
                    skips.append(LayerSkip(name, stashed[name][0], index))
                popped.add(name)
            for name in map(module.key, module.stashes):
                if name in stashed:
                    problems.append(
                        f"layer {layer_name!r} stashes {name!r}, which layer {stashed[name][1]!r} stashes "
                        "too: put one of them into a namespace with harness.nn.skip.isolate"
                    )
                stashed[name] = (index, layer_name)
    for name, (_, layer_name) in stashed.items():
        if name not in popped:
            problems.append(f"layer {layer_name!r} stashes {name!r}, which no later layer pops")
    if problems:
        raise ValueError("skips do not match: " + "; ".join(problems))
    return sorted(skips, key=lambda skip: (skip.source, skip.target, skip.name))
