"""Strict JSON round trip for frozen dataclasses, used by every record, plan and profile.

A field called ``in_`` is written ``in`` (a trailing underscore only avoids a Python keyword). Unknown keys, missing
keys without a default and wrong types are rejected with the path of the offending value.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import marshal
import math
import reprlib
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from harness.core import files

T = TypeVar("T")
DEEPEST = 64
"""Lists and objects within one another; no document of ours comes near it, and walks over one are recursive."""
LARGEST_INT = 2**63 - 1
"""Largest absolute value of whole numbers: the largest that torch, numpy and the operating system take."""
MOST_DIGITS = 300
"""Largest number of digits of a whole number: one with more cannot become a float."""


class SchemaError(ValueError):
    """A JSON document that does not match its type: the message names the path, what is expected and what is there."""


def parse(text: str | bytes) -> Any:
    """Returns the values of a JSON text. Raises SchemaError for every text that is none, or is too deep."""
    try:
        value = json.loads(text, parse_int=_whole, parse_constant=_not_finite)
    except SchemaError:
        raise
    except (ValueError, RecursionError) as error:  # ValueError: also bytes that are no text
        raise SchemaError(f"is not JSON: {error}") from error
    level, depth = [value], 0
    while level := [below for one in level if isinstance(one, (dict, list)) for below in _below(one)]:
        depth += 1
        if depth > DEEPEST:
            raise SchemaError(f"is nested more than {DEEPEST} levels deep")
    return value


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise SchemaError(f"holds a number of {len(digits)} digits")
    return int(digits)


def _not_finite(name: str) -> float:
    raise SchemaError(f"is not JSON: it holds {name}")


def _below(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def encode(value: Any) -> Any:
    """Converts dataclasses, tuples and dicts to JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name.rstrip("_"): encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return fields
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {str(key): encode(item) for key, item in value.items()}
    return value


def finite(value: Any) -> Any:
    """Replaces NaN and infinities, which JSON does not have, by null."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def decode(kind: Any, value: Any, path: str = "") -> Any:
    """Inverts `encode`, checked against the type hint `kind`. Raises SchemaError."""
    if kind is float:  # the plain kinds first: a profile has thousands of them
        _expect(isinstance(value, (int, float)) and not isinstance(value, bool), path, "a number", value)
        return float(value)
    if kind is int:
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        _expect(whole and not isinstance(value, bool), path, "a whole number", value)
        _expect(-LARGEST_INT <= value <= LARGEST_INT, path, "a whole number that fits 64 bits", value)
        return int(value)
    if kind is Any:
        return value
    origin, kinds = _parts(kind)
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(typing.cast(type, kind), value, path)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(kinds, value, path)
    if origin is tuple:
        return _decode_tuple(kinds, value, path)
    if origin is dict:
        _expect(isinstance(value, dict), path, "an object", value)
        key_kind, item_kind = kinds
        if key_kind is str and item_kind is Any:
            return dict(value)
        return {key_kind(k): decode(item_kind, v, f"{path}.{k}") for k, v in value.items()}
    if origin is typing.Literal:
        _expect(value in kinds, path, f"one of {', '.join(map(str, kinds))}", value)
        return value
    _expect(isinstance(value, kind), path, f"a {getattr(kind, '__name__', kind)}", value)
    return value


def _decode_dataclass(kind: type, value: Any, path: str) -> Any:
    _expect(isinstance(value, dict), path, f"an object ({kind.__name__})", value)
    hints, fields_by_key = _hints(kind), _fields(kind)
    if not value.keys() <= fields_by_key.keys():
        unknown = sorted(set(value) - set(fields_by_key) - {"schema"})
        _expect(not unknown, path, f"only the keys of {kind.__name__} ({', '.join(fields_by_key)})", unknown)
    arguments = {}
    for key, field in fields_by_key.items():
        where = f"{path}.{key}" if path else key
        if key in value:
            arguments[field.name] = decode(hints[field.name], value[key], where)
        else:
            needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            _expect(not needed, where, "a value", "nothing")
    try:
        return kind(**arguments)
    except SchemaError:
        raise
    except ValueError as error:
        raise SchemaError(f"{path or kind.__name__}: {error}") from error


def _decode_union(kinds: tuple[Any, ...], value: Any, path: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    errors = []
    for option in kinds:
        if option is type(None):
            continue
        try:
            return decode(option, value, path)
        except SchemaError as error:
            errors.append(str(error))
    raise SchemaError("; ".join(errors) or f"{path}: null is not allowed")


def _decode_tuple(kinds: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
    _expect(isinstance(value, (list, tuple)), path, "a list", value)
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        known: dict[bytes, Any] = {}
        return tuple(_decode_item(kinds[0], item, f"{path}[{index}]", known) for index, item in enumerate(value))
    _expect(len(kinds) == len(value), path, f"a list of {len(kinds)}", value)
    return tuple(decode(k, item, f"{path}[{index}]") for index, (k, item) in enumerate(zip(kinds, value, strict=True)))


def _decode_item(kind: Any, value: Any, path: str, known: dict[bytes, Any]) -> Any:
    """Decodes an item of a list. Objects that differ in their `name` alone, as layers of a model do, are decoded once:
    `known` has those of this list, by their bytes, in which 1, 1.0 and true are three values."""
    name = value.get("name") if isinstance(value, dict) and dataclasses.is_dataclass(kind) else None
    if not isinstance(name, str):
        return decode(kind, value, path)
    try:
        others = marshal.dumps({**value, "name": ""}, 2)
    except ValueError:  # of something that is no JSON
        return decode(kind, value, path)
    if others in known:
        return dataclasses.replace(known[others], name=name)
    known[others] = found = decode(kind, value, path)
    return found


def _expect(condition: bool, path: str, wanted: str, got: Any) -> None:
    if not condition:
        raise SchemaError(f"{path or 'the document'}: expected {wanted}, got {_shown(got)!r}")


def _shown(value: Any) -> str:
    """Short, however long or deep the value is."""
    return (value if isinstance(value, str) else reprlib.repr(value))[:80]


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


@functools.cache
def _fields(kind: type) -> dict[str, dataclasses.Field[Any]]:
    return {field.name.rstrip("_"): field for field in dataclasses.fields(kind) if field.init}


@functools.cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """The origin of a type hint, and its arguments."""
    return typing.get_origin(kind), typing.get_args(kind)


class Document:
    """Mix-in for a dataclass that is a file of its own: JSON with a `schema` number, written atomically."""

    SCHEMA: ClassVar[int] = 1

    def to_json(self) -> dict[str, Any]:
        return {"schema": self.SCHEMA, **encode(self)}

    @classmethod
    def from_json(cls, data: Any) -> Self:
        _expect(isinstance(data, dict), "", f"an object ({cls.__name__})", data)
        schema = data.get("schema", cls.SCHEMA)
        _expect(schema == cls.SCHEMA, "schema", f"{cls.SCHEMA} for a {cls.__name__}", schema)
        return decode(cls, data)

    def save(self, path: Path) -> None:
        files.write_text(path, json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a file; a `SchemaError` names the file and the wrong value, an OSError is one that cannot be read."""
        try:
            data = parse(files.read_bytes(path))
        except SchemaError as error:
            raise SchemaError(f"{path} {error}") from error
        try:
            return cls.from_json(data)
        except SchemaError as error:
            raise SchemaError(f"{path}: {error}") from error
