"""Strategies by hand: the (p0, p1, p2) of each matrix product, by patterns of their names."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import prod
from typing import ClassVar, cast, get_args

from harness.cluster import Cluster
from harness.interfaces import PlanRequest
from harness.memory import MemoryModel
from harness.plan import Plan
from harness.problem import NoPlan
from harness.profile import ModelProfile
from harness.sbp.chain import Matmul
from harness.sbp.costs import Paths, Rules
from harness.sbp.grid import Strategy
from harness.sbp.limit import within
from harness.sbp.optimum import Ends, Route
from planners import products
from planners.products import Products

EXAMPLE = "planner.strategies=[*.qkv:1x2x1,*:1x1x2]"

WRITTEN = re.compile(r".+:[1-9]\d*(x[1-9]\d*){2}((x[1-9]\d*){3})?")


@dataclass
class Config:
    """The keys of `planner=strategies`."""

    splits_products: ClassVar[bool] = True  # and asks for no layer times

    name: str = "strategies"
    """The planner."""
    strategies: list[str] = field(default_factory=list)
    """p0 x p1 x p2 of each product: [*.qkv:1x2x1,*:1x1x2]. The first pattern that is like a name counts. On several
    nodes of several devices each of the three is two numbers: nodes, and devices of each."""
    paths: str = "mixed"
    """As of planner=autoddl."""
    ends: str = "free"
    """As of planner=autoddl."""


class Strategies:
    """Between the products it takes the cheapest way that there is."""

    def __init__(self, config: Config) -> None:
        self.config, self.ends = config, cast(Ends, config.ends)

    def plan(self, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest) -> Plan:
        """`predicted` is that of planner=autoddl. Raises NoPlan for strategies that are not those of the model and the
        devices, and where they do not fit."""
        rules = Rules(cast(Paths, self.config.paths))
        return products.planned(profile, cluster, memory, request, rules, self._route, self.ends)

    def _route(self, found: Products) -> Route:
        given, search = self._given(found), found.search(self.ends)
        for item in found.chain.matmuls:
            allowed = found.costs.strategies(item)
            if given[item.name] not in allowed:
                what = f"cannot split it: {item.samples} samples in a micro-batch, {item.inputs} x {item.outputs}"
                raise NoPlan(_told(found, item, given), what, f"one of {_some([_x(found, one) for one in allowed])}")
        if search.ties():
            _check_tied(found, given)
        return within(found.search(self.ends, given=given), found.limit)

    def _given(self, found: Products) -> dict[str, Strategy]:
        """The strategy of each product."""
        names, patterns = [item.name for item in found.chain.matmuls], _read(self.config.strategies)
        chosen = {name: next((p for p in patterns if fnmatchcase(name, p)), None) for name in names}
        if missing := [name for name, pattern in chosen.items() if pattern is None]:
            what = f"have none for {_some(missing)}"
            raise NoPlan("planner.strategies", what, f"further ones, at last *:{_plain(found)}")
        if unused := [pattern for pattern in patterns if pattern not in chosen.values()]:
            what = f"is like no product that is left for it, of {_some(names)}"
            raise NoPlan(f"planner.strategies {unused[0]}", what, f"without {unused[0]}")
        return {name: _strategy(found, str(pattern), patterns[str(pattern)]) for name, pattern in chosen.items()}


def _read(strategies: list[str]) -> dict[str, tuple[int, ...]]:
    """The numbers of each pattern. Raises ValueError."""
    parts = [text.rpartition(":") for text in strategies]
    return {pattern: tuple(int(number) for number in numbers.split("x")) for pattern, _, numbers in parts}


def _strategy(found: Products, pattern: str, numbers: tuple[int, ...]) -> Strategy:
    grid = found.costs.grid
    try:
        return grid.strategy(numbers)
    except ValueError as error:
        several = grid.nodes > 1 and grid.local > 1
        there = f"{grid.nodes} nodes of {grid.local}" if several else f"{grid.nodes * grid.local} devices"
        what = f"is {prod(numbers)} devices in {len(numbers)} numbers, there are {there}"
        key = f"planner.strategies {pattern}:{'x'.join(map(str, numbers))}"
        raise NoPlan(key, what, f"numbers as {_plain(found)}") from error


def _check_tied(found: Products, given: dict[str, Strategy]) -> None:
    """The head's weight is the embedding's, turned: so is its strategy."""
    first, last = found.chain.matmuls[0], found.chain.matmuls[-1]
    p0, p1, p2 = given[first.name]
    if given[last.name] != (p0, p2, p1):
        what = f"has the weight of {first.name}, which is split by {_x(found, given[first.name])}"
        raise NoPlan(_told(found, last, given), what, f"{last.name}:{_x(found, Strategy(p0, p2, p1))}")


def _told(found: Products, item: Matmul, given: dict[str, Strategy]) -> str:
    return f"planner.strategies {item.name} {_x(found, given[item.name])}"


def _x(found: Products, strategy: Strategy) -> str:
    return "x".join(map(str, found.costs.grid.numbers(strategy)))


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + " ..." * (len(names) > 5)


def _plain(found: Products) -> str:
    """Numbers that are right for the devices."""
    grid = found.costs.grid
    return _x(found, Strategy(grid.all, grid.none, grid.none))


def build(config: Config) -> Strategies:
    """The planner; raises ValueError as `check` does."""
    check(config)
    return Strategies(config)


def check(config: Config) -> None:
    """Raise ValueError with a line for each value that no run can have."""
    wrong = []
    if not config.strategies:
        wrong.append(f"planner.strategies []   say nothing of any product   -> {EXAMPLE}")
    for text in config.strategies:
        if not WRITTEN.fullmatch(text):
            what = "is no pattern with 3 numbers of at least 1 (6 on several nodes of several devices)"
            wrong.append(f"planner.strategies {text}   {what}   -> {EXAMPLE}")
    wrong += _twice(config.strategies)
    for key, known in (("paths", get_args(Paths)), ("ends", get_args(Ends))):
        value = getattr(config, key)
        if value not in known:
            wrong.append(f"planner.{key} {value}   is none of {', '.join(known)}   -> planner.{key}={known[0]}")
    if wrong:
        raise ValueError("\n".join(wrong))


def _twice(strategies: list[str]) -> list[str]:
    """A line where a pattern stands twice: the second one would never count."""
    first: dict[str, str] = {}
    for text in strategies:
        first.setdefault(text.rpartition(":")[0], text)
    patterns = [text.rpartition(":")[0] for text in strategies]
    told = ", ".join(pattern for pattern in first if patterns.count(pattern) > 1)
    mend = f"planner.strategies=[{','.join(first.values())}]"
    return [f"planner.strategies {told}   must stand once, the first one counts   -> {mend}"] if told else []
