"""Values as a forward pass hands them over: nested tuples, lists, dictionaries, dataclasses, with tensors in them.

({"mask": m}, [x, 2])    ->  Nest(tuple, (Nest(dict, (Ref(1),)), Nest(list, (Ref(0), 2))))      a template
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Ref:
    """A tensor of a trace, by its number."""

    number: int


@dataclass(frozen=True)
class Nest:
    """A container: `items` under `keys` (dictionaries, dataclasses) or in order. `kind` is its type."""

    kind: type
    items: tuple[Any, ...]
    keys: tuple[Any, ...] | None = None

    def mapped(self, function: Callable[[Any], Any]) -> Nest:
        """The same container with other items."""
        return Nest(self.kind, tuple(map(function, self.items)), self.keys)

    @property
    def by_position(self) -> bool:
        """Whether the type is a namedtuple, whose items are its arguments."""
        return issubclass(self.kind, tuple) and hasattr(self.kind, "_fields")

    @property
    def by_keyword(self) -> bool:
        """Whether the items are keyword arguments of the type: dataclasses, Hugging Face's outputs among them."""
        return dataclasses.is_dataclass(self.kind)


def opened(value: Any) -> Nest | None:
    """One level of a container; None of a leaf."""
    if isinstance(value, tuple | list):
        return Nest(type(value), tuple(value))
    if isinstance(value, slice):
        return Nest(slice, (value.start, value.stop, value.step))
    if isinstance(value, Mapping) and isinstance(value, dict):
        return Nest(type(value), tuple(value.values()), tuple(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return Nest(type(value), tuple(getattr(value, name) for name in names), tuple(names))
    return None


def template(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """The value with `leaf` of what is no container, containers as `Nest`."""
    nest = opened(value)
    return leaf(value) if nest is None else nest.mapped(lambda item: template(item, leaf))


def built(form: Any, leaf: Callable[[Any], Any]) -> Any:
    """The inverse of `template`."""
    if not isinstance(form, Nest):
        return leaf(form)
    items = [built(item, leaf) for item in form.items]
    if form.kind is slice:
        return slice(*items)
    if form.by_keyword:
        return form.kind(**dict(zip(form.keys or (), items, strict=True)))
    if form.keys is not None:
        return form.kind(zip(form.keys, items, strict=True))
    return form.kind(*items) if form.by_position else form.kind(items)


def leaves(form: Any) -> Iterator[Any]:
    """The leaves of a template, in order."""
    if isinstance(form, Nest):
        for item in form.items:
            yield from leaves(item)
    else:
        yield form


def refs(form: Any) -> list[int]:
    """The numbers of the tensors in a template."""
    return [leaf.number for leaf in leaves(form) if isinstance(leaf, Ref)]


def places(form: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a template, each with the Python expression that gets it out of the value: "[0].logits"."""
    if not isinstance(form, Nest):
        yield path, form
        return
    for index, item in enumerate(form.items):
        if form.keys is None:
            step = f"[{index}]"
        elif issubclass(form.kind, dict):
            step = f"[{form.keys[index]!r}]"
        else:
            step = f".{form.keys[index]}"
        yield from places(item, path + step)


def tensors(value: Any) -> list[Tensor]:
    """The tensors in a nested value, in order; of a chain's inputs and outputs these are what passes."""
    nest = opened(value)
    if nest is None:
        return [value] if isinstance(value, Tensor) else []
    return [tensor for item in nest.items for tensor in tensors(item)]


def flat(value: Any) -> Tensor | tuple[Tensor, ...]:
    """The tensors of a nested value as layers pass them: one by itself, several as a tuple."""
    found = tensors(value)
    return found[0] if len(found) == 1 else tuple(found)
