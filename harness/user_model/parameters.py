"""What is known of the parameters of a user's callable: which of them are keys, of which types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.core.problem import Problem
from harness.core.serialization import Document
from harness.user_model.kinds import Kind, key_value

RESERVED = ("name", "callable", "source")
"""Keys that every user's model has, and that no parameter can be."""


@dataclass(frozen=True)
class Parameter:
    """A parameter; `kind` None: it can be no key. `annotation` is as it is written, "" without one."""

    name: str
    kind: Kind | None
    required: bool = False
    default: Any = None
    annotation: str = ""
    help: str = ""

    @property
    def is_key(self) -> bool:
        """Whether it is a key: one that cannot be has its default."""
        return self.kind is not None and self.name not in RESERVED and self.name.isascii()


@dataclass(frozen=True)
class Signature(Document):
    """The parameters of a callable, in order, and the first paragraph of its docstring."""

    parameters: tuple[Parameter, ...] = ()
    meaning: str = ""
    problems: tuple[Problem, ...] = ()

    @property
    def keys(self) -> list[Parameter]:
        """The parameters that are keys."""
        return [one for one in self.parameters if one.is_key]


def parameter(name: str, kind: Kind | None, default: Any, required: bool, annotation: str, text: str) -> Parameter:
    """A parameter whose default fits its type, or that is no key."""
    value = None if required else key_value(default)
    fits = required or (kind is not None and kind.takes(value))
    return Parameter(name, kind if fits else None, required, value if fits else None, annotation, text)
