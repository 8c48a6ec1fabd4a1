"""The planner `autoddl`: the cheapest strategies of a chain of matmuls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, ClassVar, cast, get_args

from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan
from harness.core.problem import NoPlan, Problem, refuse
from harness.core.value_checks import above_0, at_least, one_of
from harness.interfaces import PlanRequest
from harness.sbp.memory_limit import cheapest_within
from harness.sbp.shortest_path import Ends, Route, Search
from harness.sbp.strategy_costs import Paths, Rules, Splits
from planners import tensor_parallel_base
from planners.tensor_parallel_base import SplitProblem

if TYPE_CHECKING:
    from planners.autoddl.heuristics import SearchResult

SEARCHES = ("exact", "exhaustive", "random", "metropolis_hastings", "coordinate_descent")
DRAWING = SEARCHES[2:]
"""The searches that draw random plans."""
CONVOLUTIONS = ("split", "data_parallel")
SEARCHED = ("evaluations", "history", "elapsed_s", "search_s")
"""What a plan predicts of a search of the paper (`heuristics.SearchResult`)."""
LARGEST = 10**7
"""The most plans that an exhaustive search evaluates."""


@dataclass
class Config:
    splits_matmuls: ClassVar[bool] = True  # and asks for no layer times

    name: str = "autoddl"
    """The planner."""
    search: str = "exact"
    """exact: the proven optimum; exhaustive, random, metropolis_hastings or coordinate_descent: the searches of the
    paper."""
    paths: str = "mixed"
    """How tensors change layout between matmuls. mixed: all-to-all only among the devices whose blocks change; paper:
    among all devices, as in the paper's costs."""
    ends: str = "free"
    """Layout of the model's input and output. free: as the first and the last layer have it, and the input needs no
    gradient; batch_split: both are split along the batch, and have gradients."""
    splits: str = "even"
    """Which strategies are considered. even: sizes are divided without remainder; power_of_two: also p1 and p2 are
    powers of two; any: shards may differ in size (planning only)."""
    convolutions: str = "split"
    """How convolutions are split. split: as other matmuls; data_parallel: by samples alone, as in the paper (Sec.
    5.1.1)."""
    repeat: bool = False
    """Give repeated layers the same strategy, as in the paper."""
    max_replicas: int | None = None
    """The largest p0, which is how the paper limits memory; null: no limit."""
    memory_gb: float | None = None
    """Memory limit of a device in GB (1e9 bytes), for search=exact; null: the device's memory."""
    evaluations: int = 10_000
    """Number of plans that random, metropolis_hastings and coordinate_descent evaluate."""
    seed: int = 0
    """Random seed of random, metropolis_hastings and coordinate_descent."""


def build(config: Config) -> AutoDDL:
    """Returns the planner; raises `CannotRun` with what `check` finds."""
    refuse(check(config), "planner=autoddl")
    return AutoDDL(config)


def check(config: Config) -> list[Problem]:
    """Checks the values of the keys."""
    choices = {"search": SEARCHES, "paths": get_args(Paths), "ends": get_args(Ends), "splits": get_args(Splits),
               "convolutions": CONVOLUTIONS}  # fmt: skip
    problems = [
        problem for key, values in choices.items() for problem in one_of(f"planner.{key}", getattr(config, key), values)
    ]
    for key, least in (("max_replicas", 1), ("evaluations", 1), ("seed", 0)):
        problems += at_least(f"planner.{key}", getattr(config, key), least)
    return [*problems, *above_0("planner.memory_gb", config.memory_gb, 16), *_unused(config)]


def _unused(config: Config) -> list[Problem]:
    """Returns problems for keys that are set but not used by the search."""
    problems, unset = [], Config()
    for searches, keys in ((("exact",), ("memory_gb", "repeat")), (DRAWING, ("evaluations", "seed"))):
        for key in keys if config.search in SEARCHES and config.search not in searches else ():
            value, default = getattr(config, key), getattr(unset, key)
            if value != default:
                message = f"is for planner.search={' or '.join(searches)}, planner.search is {config.search}"
                problems.append(Problem(f"planner.{key}", value, message, ({f"planner.{key}": default},)))
    return problems


class AutoDDL:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.ends = cast(Ends, config.ends)

    def plan(self, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest) -> Plan:
        """Returns a plan; `predicted` holds `communication_s` of a step (also by phase and matmul), what a device
        holds, and what a search of the paper has evaluated.

        Raises NoPlan where nothing divides, or nothing fits.
        """
        config = self.config
        results: list[SearchResult] = []
        whole = config.convolutions == "data_parallel"
        rules = Rules(
            cast(Paths, config.paths), cast(Splits, config.splits), config.max_replicas, whole_convolutions=whole
        )

        def search(problem: SplitProblem) -> Route:
            results.append(self._searched(problem.search(self.ends)))
            return results[-1].route

        exact = config.search == "exact"
        plan = tensor_parallel_base.plan_matmuls(
            profile,
            cluster,
            memory,
            request,
            rules,
            self._exact if exact else search,
            self.ends,
            config.memory_gb,
            self._exact,
        )
        if exact:
            return plan
        searched = {name: getattr(results[-1], name) for name in SEARCHED}
        return replace(plan, predicted=plan.predicted | searched)

    def _exact(self, problem: SplitProblem) -> Route:
        return cheapest_within(problem.search(self.ends, repeat=self.config.repeat), problem.limit)

    def _searched(self, search: Search) -> SearchResult:
        """Runs a search of the paper. An exhaustive one evaluates all plans."""
        from planners.autoddl.heuristics import find

        config, evaluations = self.config, self.config.evaluations
        if config.search == "exhaustive":
            evaluations = prod(len(search.strategies(item)) for item in search.matmuls)
            if evaluations > LARGEST:
                message = f"would evaluate {evaluations:.3g} plans, at most {LARGEST:.0e} take minutes"
                raise NoPlan(Problem("planner.search", "exhaustive", message, ({"planner.search": "exact"},)))
        return find(search, config.search, evaluations, config.seed)
