"""The types that a parameter of a user's callable may have to become a key. Does not import torch.

    int, float, bool, str    Literal["relu", "gelu"]    an Enum, by the names of its members
    Optional[int]            list[int], tuple[int, ...], tuple[int, int], Sequence[int]

A parameter without annotation has the type of its default.
"""

from __future__ import annotations

import collections.abc
import enum
import inspect
import math
import types
import typing
from dataclasses import dataclass, replace
from typing import Any

PLAIN: dict[Any, str] = {bool: "bool", int: "int", float: "float", str: "str"}
TYPES = {name: kind for kind, name in PLAIN.items()}
LISTS = (list, tuple, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
NOTHING = inspect.Parameter.empty


@dataclass(frozen=True)
class Kind:
    """The type of a key: `base` is that of a value, or of each of `many`, whose number may be fixed by `length`."""

    base: str
    optional: bool = False
    many: bool = False
    length: int | None = None
    choices: tuple[Any, ...] = ()

    @property
    def hint(self) -> Any:
        """The type hint of a dataclass's field, as OmegaConf takes it."""
        hint: Any = TYPES[self.base]
        hint = list[hint] if self.many else hint
        return hint | None if self.optional else hint

    def takes(self, value: Any) -> bool:
        """Whether a value of a key has this type."""
        if value is None:
            return self.optional
        if self.many:
            right = isinstance(value, list) and self.length in (None, len(value))
            return right and all(replace(self, many=False, optional=False).takes(one) for one in value)
        wanted = (int, float) if self.base == "float" else TYPES[self.base]
        same = isinstance(value, wanted) and (isinstance(value, bool) == (self.base == "bool"))
        finite = not isinstance(value, float) or math.isfinite(value)
        return same and finite and (not self.choices or value in self.choices)


def kind_of(hint: Any, default: Any = NOTHING) -> Kind | None:
    """Return the type of a key for an annotation, or for the default of a parameter that has none or only `list`.

    None for what no key can hold. A default None makes the key optional.
    """
    if hint in (NOTHING, Any, None):
        return _kind_of_value(default)
    if hint in (list, tuple):
        return _kind_of_value(default) if isinstance(default, list | tuple) else None
    kind = _of_hint(hint)
    return replace(kind, optional=True) if kind and default is None else kind


def key_value(default: Any) -> Any:
    """A default as the value of a key: a member of an Enum by its name, a tuple as a list."""
    if isinstance(default, enum.Enum):
        return default.name
    return [key_value(one) for one in default] if isinstance(default, list | tuple) else default


def argument(value: Any, hint: Any, default: Any = NOTHING) -> Any:
    """The value of a key as the callable takes it; the inverse of `key_value`."""
    if value == key_value(default) and default is not NOTHING:
        return default
    hint = _without_none(hint)
    origin = typing.get_origin(hint) or hint
    if isinstance(value, list):
        items = [one for one in typing.get_args(hint) if one is not Ellipsis][:1]
        values = [argument(one, *items) if items else one for one in value]
        as_tuple = origin is tuple or (hint in (NOTHING, Any) and isinstance(default, tuple))
        return tuple(values) if as_tuple else values
    if isinstance(default, enum.Enum) and hint in (NOTHING, Any):
        hint = type(default)
    if isinstance(hint, type) and issubclass(hint, enum.Enum) and isinstance(value, str):
        return hint[value]
    return float(value) if hint is float and isinstance(value, int) else value


def _of_hint(hint: Any) -> Kind | None:
    if typing.get_origin(hint) is typing.Annotated:
        return _of_hint(typing.get_args(hint)[0])
    if (inner := _without_none(hint)) is not hint:
        kind = _of_hint(inner)
        return replace(kind, optional=True) if kind else None
    if hint in PLAIN:
        return Kind(PLAIN[hint])
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return Kind("str", choices=tuple(hint.__members__))
    origin, items = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return _of_literal(items)
    return _of_list(origin, items) if origin in LISTS and items else None


def _of_literal(values: tuple[Any, ...]) -> Kind | None:
    named = tuple(one for one in values if one is not None)
    kinds = {PLAIN.get(type(one)) for one in named}
    base = kinds.pop() if len(kinds) == 1 else None
    return Kind(base, optional=None in values, choices=named) if base else None


def _of_list(origin: Any, items: tuple[Any, ...]) -> Kind | None:
    """list[int], tuple[int, ...] and tuple[int, int]: all items have one type."""
    several = [one for one in items if one is not Ellipsis]
    kinds = [_of_hint(one) for one in several]
    first = kinds[0]
    if first is None or first.many or first.optional or any(kind != first for kind in kinds):
        return None
    fixed = origin is tuple and Ellipsis not in items
    return replace(first, many=True, length=len(several) if fixed else None)


def _without_none(hint: Any) -> Any:
    """The one type that a hint leaves that is not None; the hint itself if there are several, or no None."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint
    others = [one for one in typing.get_args(hint) if one is not type(None)]
    return others[0] if len(others) == 1 and len(typing.get_args(hint)) == 2 else hint


def _kind_of_value(value: Any) -> Kind | None:
    if isinstance(value, enum.Enum):
        return _of_hint(type(value))
    if isinstance(value, list | tuple):
        kinds = {PLAIN.get(type(one)) for one in value}
        base = "float" if kinds == {"int", "float"} else kinds.pop() if len(kinds) == 1 else None
        return Kind(base, many=True) if base else None
    base = PLAIN.get(type(value))
    return Kind(base) if base else None
