"""What several models ask of their keys: lines of a `check(config)`, `key   what   -> mend`; none where all is well."""

from __future__ import annotations


def at_least(config: object, key: str, least: int, why: str = "", mend: int | None = None) -> list[str]:
    """For a number below `least`. The mend is the key's default, unless another is given."""
    value = getattr(config, key)
    if value >= least:
        return []
    reason = f": {why}" if why else ""
    right = getattr(type(config), key) if mend is None else mend
    return [f"model.{key} {value}   must be at least {least}{reason}   -> model.{key}={right}"]


def probability(config: object, key: str, mend: float) -> list[str]:
    """For a number that is no share of what is zeroed in training."""
    value = getattr(config, key)
    if 0 <= value < 1:
        return []
    return [f"model.{key} {value}   must be at least 0 and below 1   -> model.{key}={mend}"]


def each_at_least_1(config: object, key: str, part: str) -> tuple[list[int], list[str]]:
    """The numbers of a list, one for each `part` of the network, and a line if they had to be mended."""
    numbers = getattr(config, key)
    right = [max(1, number) for number in numbers] or getattr(type(config)(), key)
    if numbers == right:
        return right, []
    line = f"model.{key} {numbers}   must be one number of at least 1 for each {part}   -> model.{key}={right}"
    return right, [line.replace(", ", ",")]
