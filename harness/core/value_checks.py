"""Checks of one value for a plug-in's `check(config)`: each returns a list with one problem, or an empty one."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from harness.core.problem import Problem


def one_of(key: str, value: Any, known: Sequence[Any], default: Any = None) -> list[Problem]:
    """A value must be one of those that are known. The fix is the closest one, else the default or the first."""
    if value in known:
        return []
    near = closest(str(value), list(map(str, known)), None if default is None else str(default))
    fix = next(one for one in known if str(one) == near)
    return [Problem(key, value, f"is not one of {', '.join(map(str, known))}", ({key: fix},))]


def at_least(key: str, value: float | None, least: float, fix: Any = None, why: str = "") -> list[Problem]:
    """A number, if it is given, must be at least `least`; the fix is that, unless another one is given."""
    if value is None or value >= least:
        return []
    reason = f": {why}" if why else ""
    return [Problem(key, value, f"must be at least {least}{reason}", ({key: least if fix is None else fix},))]


def above_0(key: str, value: float | None, fix: Any) -> list[Problem]:
    """A number, if it is given, must be above 0."""
    return [] if value is None or value > 0 else [Problem(key, value, "must be above 0", ({key: fix},))]


def closest(typed: str, known: Sequence[str], default: str | None = None) -> str:
    """The known word that was probably meant: a similar one, else the default or the first."""
    return similar(typed, known) or default or known[0]


def similar(typed: str, known: Sequence[str]) -> str | None:
    """The known word that begins so, else the most similar one, if any is. Capitals count as small letters."""
    typed = typed.lower()
    small = {word.lower(): word for word in known}
    begun = [word for word in small if word.startswith(typed)]
    near = begun or difflib.get_close_matches(typed, list(small), n=1)
    return small[near[0]] if near else None
