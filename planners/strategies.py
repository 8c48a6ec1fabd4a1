"""The planner `strategies`: the user specifies (p0, p1, p2) of each matmul, by patterns of their names."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import prod
from typing import ClassVar, cast, get_args

from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan
from harness.core.problem import NoPlan, Problem, refuse
from harness.core.value_checks import one_of
from harness.interfaces import PlanRequest
from harness.sbp.device_grid import Strategy
from harness.sbp.matmul_chain import Matmul
from harness.sbp.memory_limit import cheapest_within
from harness.sbp.shortest_path import Ends, Route
from harness.sbp.strategy_costs import Paths, Rules
from planners import tensor_parallel_base
from planners.tensor_parallel_base import SplitProblem

KEY = "planner.strategies"
EXAMPLE = "planner.strategies=[*.qkv:1x2x1,*:1x1x2]"

WRITTEN = re.compile(r".+:[1-9]\d*(x[1-9]\d*){2}((x[1-9]\d*){3})?")


@dataclass
class Config:
    """The keys of `planner=strategies`."""

    splits_matmuls: ClassVar[bool] = True  # and asks for no layer times

    name: str = "strategies"
    """The planner."""
    strategies: list[str] = field(default_factory=list)
    """p0 x p1 x p2 of each matmul: [*.qkv:1x2x1,*:1x1x2]. The first pattern that matches a layer's name applies. On
    several nodes of several devices give two numbers for each of the three: nodes, then devices of a node."""
    paths: str = "mixed"
    """The same as with planner=autoddl."""
    ends: str = "free"
    """The same as with planner=autoddl."""


class Strategies:
    """Takes the cheapest layouts between matmuls with the given strategies."""

    def __init__(self, config: Config) -> None:
        self.config, self.ends = config, cast(Ends, config.ends)

    def plan(self, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest) -> Plan:
        """Returns a plan; `predicted` is that of planner=autoddl. Raises NoPlan for strategies that are not those of
        the model and the devices, and where they do not fit."""
        rules = Rules(cast(Paths, self.config.paths))
        return tensor_parallel_base.plan_matmuls(profile, cluster, memory, request, rules, self._route, self.ends)

    def _route(self, problem: SplitProblem) -> Route:
        given, search = self._given(problem), problem.search(self.ends)
        for item in problem.chain.matmuls:
            allowed = problem.costs.strategies(item)
            if given[item.name] not in allowed:
                why = f"{item.samples} samples in a micro-batch, {item.inputs} x {item.outputs}"
                hint = f"one of {_first_few([_as_text(problem, strategy) for strategy in allowed])}"
                raise _no_plan(problem, item, given, f"cannot split it: {why}", hint)
        if search.ties():
            _check_tied(problem, given)
        return cheapest_within(replace(search, fixed=given), problem.limit)

    def _given(self, problem: SplitProblem) -> dict[str, Strategy]:
        """Returns the strategy of each matmul."""
        names, patterns = [item.name for item in problem.chain.matmuls], _read(self.config.strategies)
        chosen = {name: next((p for p in patterns if fnmatchcase(name, p)), None) for name in names}
        if missing := [name for name, pattern in chosen.items() if pattern is None]:
            fix = {KEY: [*self.config.strategies, f"*:{_valid_example(problem)}"]}
            raise NoPlan(Problem(KEY, None, f"has no strategy for {_first_few(missing)}", (fix,)))
        if unused := [pattern for pattern in patterns if pattern not in chosen.values()]:
            message = f"matches no remaining matmul of {_first_few(names)}"
            fix = {KEY: [text for text in self.config.strategies if text.rpartition(":")[0] not in unused]}
            raise NoPlan(Problem(KEY, unused[0], message, (fix,)))
        return {name: _strategy(problem, str(pattern), patterns[str(pattern)]) for name, pattern in chosen.items()}


def _read(strategies: list[str]) -> dict[str, tuple[int, ...]]:
    """Returns the numbers of each pattern. Raises ValueError."""
    parts = [text.rpartition(":") for text in strategies]
    return {pattern: tuple(int(number) for number in numbers.split("x")) for pattern, _, numbers in parts}


def _strategy(problem: SplitProblem, pattern: str, numbers: tuple[int, ...]) -> Strategy:
    grid = problem.costs.grid
    try:
        return grid.strategy(numbers)
    except ValueError as error:
        several = grid.nodes > 1 and grid.local > 1
        available = f"{grid.nodes} nodes of {grid.local}" if several else f"{grid.nodes * grid.local} devices"
        message = f"is {prod(numbers)} devices in {len(numbers)} numbers, there are {available}"
        value = f"{pattern}:{'x'.join(map(str, numbers))}"
        raise NoPlan(Problem(KEY, value, message, hint=f"numbers as {_valid_example(problem)}")) from error


def _check_tied(problem: SplitProblem, given: dict[str, Strategy]) -> None:
    """Checks that a head with the embedding's weight has the transposed strategy. Raises NoPlan."""
    first, last = problem.chain.matmuls[0], problem.chain.matmuls[-1]
    p0, p1, p2 = given[first.name]
    if given[last.name] != (p0, p2, p1):
        message = f"has the weight of {first.name}, which is split by {_as_text(problem, given[first.name])}"
        raise _no_plan(problem, last, given, message, f"{last.name}:{_as_text(problem, Strategy(p0, p2, p1))}")


def _no_plan(problem: SplitProblem, item: Matmul, given: dict[str, Strategy], message: str, hint: str) -> NoPlan:
    return NoPlan(Problem(KEY, f"{item.name}:{_as_text(problem, given[item.name])}", message, hint=hint))


def _as_text(problem: SplitProblem, strategy: Strategy) -> str:
    return "x".join(map(str, problem.costs.grid.numbers(strategy)))


def _first_few(names: list[str]) -> str:
    return ", ".join(names[:5]) + " ..." * (len(names) > 5)


def _valid_example(problem: SplitProblem) -> str:
    """Returns numbers that are valid for the devices."""
    grid = problem.costs.grid
    return _as_text(problem, Strategy(grid.all, grid.none, grid.none))


def build(config: Config) -> Strategies:
    """Returns the planner; raises `CannotRun` with what `check` finds."""
    refuse(check(config), "planner=strategies")
    return Strategies(config)


def check(config: Config) -> list[Problem]:
    """Checks the values of the keys."""
    problems = [] if config.strategies else [Problem(KEY, [], "has no strategy for any matmul", hint=EXAMPLE)]
    message = "is not a pattern with 3 numbers of at least 1 (6 on several nodes of several devices)"
    problems += [Problem(KEY, text, message, hint=EXAMPLE) for text in config.strategies if not WRITTEN.fullmatch(text)]
    problems += _duplicates(config.strategies) + one_of("planner.paths", config.paths, get_args(Paths))
    return problems + one_of("planner.ends", config.ends, get_args(Ends))


def _duplicates(strategies: list[str]) -> list[Problem]:
    """Returns a problem for patterns that are listed twice: the second one would never count."""
    first: dict[str, str] = {}
    for text in strategies:
        first.setdefault(text.rpartition(":")[0], text)
    patterns = [text.rpartition(":")[0] for text in strategies]
    twice = ", ".join(pattern for pattern in first if patterns.count(pattern) > 1)
    fix = {KEY: list(first.values())}
    return [Problem(KEY, twice, "must be given once, the first one counts", (fix,))] if twice else []
