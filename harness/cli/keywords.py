"""Keys as the keyword arguments of a function, and what they are on the command line. Does not import torch.

engine=["gpipe", "ddp"]        engine=gpipe,ddp         a list: each value in turn
mesh={"pipeline": 2}           mesh.pipeline=2          a dict: keys of a group
planner={"balance": (3, 5)}    planner.balance=[3,5]    a tuple: one value, which is a list
profile=None                   profile=null
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from harness.core.problem import Problem, refuse, spelled


def overrides(keys: Mapping[str, Any]) -> list[str]:
    """The keys as they are typed. Raises CannotRun with all values that no key takes."""
    problems: list[Problem] = []
    texts = [text for key, value in keys.items() for text in _typed(key, value, problems)]
    refuse(problems)
    return texts


def _typed(key: str, value: Any, problems: list[Problem]) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from _typed(f"{key}.{name}", one, problems)
        return
    values = value if isinstance(value, list) else [value]
    if not values:
        problems.append(Problem(key, None, "is an empty list, so there is no point", hint=f"{key}=[...]"))
    elif wrong := [one for one in values if not _is_value(one)]:
        message = f"is {wrong[0]!r:.60} ({type(wrong[0]).__name__}), which no key takes"
        problems.append(
            Problem(key, None, message, hint="a number, a text, None, a tuple, or a list of several values")
        )
    else:
        yield f"{key}={','.join(map(spelled, values))}"


def _is_value(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_value, value))
    return value is None or isinstance(value, str | int | float | os.PathLike)
