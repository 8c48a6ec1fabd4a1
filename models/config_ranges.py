"""Checks of keys that several models share."""

from __future__ import annotations

from harness.core import value_checks
from harness.core.problem import Problem


def at_least(config: object, key: str, least: int, why: str = "", fix: int | None = None) -> list[Problem]:
    """A number below `least`. The fix is the key's default, unless another one is given."""
    right = getattr(type(config), key) if fix is None else fix
    return value_checks.at_least(f"model.{key}", getattr(config, key), least, right, why)


def probability(config: object, key: str, fix: float) -> list[Problem]:
    """A number that is no share of what is zeroed in training."""
    value = getattr(config, key)
    if 0 <= value < 1:
        return []
    return [Problem(f"model.{key}", value, "must be at least 0 and below 1", ({f"model.{key}": fix},))]


def each_at_least_1(config: object, key: str, part: str) -> tuple[list[int], list[Problem]]:
    """The numbers of a list, one for each `part` of the network, and a problem if they had to be replaced."""
    numbers = getattr(config, key)
    right = [max(1, number) for number in numbers] or getattr(type(config)(), key)
    if numbers == right:
        return right, []
    message = f"must be one number of at least 1 for each {part}"
    return right, [Problem(f"model.{key}", list(numbers), message, ({f"model.{key}": right},))]


def divides(config: object, key: str, whole_key: str) -> list[Problem]:
    """A number that does not divide another key's. The fixes are the largest divisor below it, and the smallest above
    it where there is one. Numbers below 1 are for `at_least`."""
    number, whole = getattr(config, key), getattr(config, whole_key)
    if number < 1 or whole < 1 or whole % number == 0:
        return []
    below = next(n for n in range(min(number, whole), 0, -1) if whole % n == 0)
    above = next((n for n in range(number, whole + 1) if whole % n == 0), None)
    fixes = tuple({f"model.{key}": right} for right in (below, above) if right is not None)
    return [Problem(f"model.{key}", number, f"does not divide model.{whole_key} {whole}", fixes)]


def above_0(config: object, key: str) -> list[Problem]:
    """A number that is not above 0. The fix is the key's default."""
    return value_checks.above_0(f"model.{key}", getattr(config, key), getattr(type(config), key))
