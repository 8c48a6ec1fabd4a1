"""What problems offer to type: "mesh.pipeline=2, or cluster.devices=4" are two ways, and the first one counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from harness.problem import Problem


def typed(changes: Mapping[str, Any]) -> str:
    """Keys with their values as the user would type them."""
    shown = {True: "true", False: "false"}
    return " ".join(f"{key}={shown[value] if isinstance(value, bool) else value}" for key, value in changes.items())


def mended(problems: Sequence[Problem], key: str, value: int) -> int:
    """What a key will be once these problems are mended, each in the first of its ways."""
    ways = (_first_way(problem.mend) for problem in problems)
    return min([value, *(way[key] for way in ways if key in way)])


def told_once(problems: Sequence[Problem]) -> list[Problem]:
    """The same problems, each once; of those that mend one key by different numbers, the one with the smallest.

    Its other ways are left out then: they mend only one of the two.
    """
    kept: dict[tuple[str, str], Problem] = {}
    for problem in problems:
        way = _first_way(problem.mend)
        place = (problem.key, " ".join(way) or problem.what)
        former = kept.setdefault(place, problem)
        other = _first_way(former.mend)
        if way != other:
            least = {key: min(number, other[key]) for key, number in way.items()}
            kept[place] = replace(problem if least == way else former, mend=typed(least))
    return list(kept.values())


def _first_way(mend: str) -> dict[str, int]:
    """The keys that are to have a number in the first way that is offered."""
    words = (word.partition("=") for word in mend.partition(",")[0].split())
    return {key: int(number) for key, _, number in words if number.isdigit()}
