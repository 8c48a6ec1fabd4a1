"""`engine=all` and `engine=gpipe,ddp`: the engines that a sweep, mode=tune or mode=race compares."""

from __future__ import annotations

from collections.abc import Sequence

from harness.config import registry
from harness.core.problem import bare_key
from harness.planning.tune import schemes

ALL = "all"


def known() -> list[str]:
    """All engines; the one that trains on one device, with which others are compared, is the first."""
    names = [plugin.name for plugin in registry.scan() if plugin.group == "engine"]
    return sorted(names, key=lambda name: (name != "single", name))


def compared() -> list[str]:
    """Those of `engine=all`: the ways to use devices."""
    return list(filter(registry.is_scheme, known()))


def listed(overrides: Sequence[str]) -> list[str]:
    """The engines that `engine=` lists, which need not exist; without it none."""
    given = [text.partition("=")[2] for text in overrides if bare_key(text) == "engine"]
    names = [name.strip() for name in given[-1].strip("[]").split(",")] if given else []
    return compared() if names == [ALL] else list(dict.fromkeys(names))


def keys_of(engine: str, overrides: Sequence[str]) -> list[str]:
    """The overrides that choose an engine, among those that are given: with a planner, if it needs another one and
    mode=tune does not search for it."""
    given = any(bare_key(text) == "planner" for text in overrides)
    own = None if given or "mode=tune" in overrides else schemes.default_planner(engine)
    return [f"engine={engine}", *([f"planner={own}"] if own else [])]


def each(overrides: Sequence[str]) -> list[list[str]]:
    """The overrides with each engine in the place of `engine=all`, and of a list for mode=tune; else as they are."""
    names = listed(overrides)
    if f"engine={ALL}" not in overrides and not (tunes_several(overrides) and {*names} <= {*known()}):
        return [list(overrides)]
    others = [text for text in overrides if bare_key(text) != "engine"]
    return [[*others, *keys_of(engine, overrides)] for engine in names]


def tunes_several(overrides: Sequence[str]) -> bool:
    """Whether this is mode=tune over several engines, which is a sweep without -m."""
    return "mode=tune" in overrides and len(listed(overrides)) > 1
