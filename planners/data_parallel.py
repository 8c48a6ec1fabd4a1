"""The planner `data_parallel`: every matmul is split by samples alone, (P, 1, 1). A baseline of AutoDDL and
Megatron."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan
from harness.core.problem import Problem, refuse
from harness.core.value_checks import one_of
from harness.interfaces import PlanRequest
from harness.sbp import baselines
from harness.sbp.shortest_path import Ends, Route
from harness.sbp.strategy_costs import Rules
from planners import tensor_parallel_base
from planners.tensor_parallel_base import SplitProblem


@dataclass
class Config:
    """The keys of `planner=data_parallel`."""

    splits_matmuls: ClassVar[bool] = True  # and asks for no layer times

    name: str = "data_parallel"
    """The planner."""
    ends: str = "free"
    """The same as with planner=autoddl; it does not change the cost here."""


class DataParallel:
    """Every device has all weights; only their gradients are all-reduced."""

    def __init__(self, config: Config) -> None:
        self.ends = cast(Ends, config.ends)

    def plan(self, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest) -> Plan:
        """Returns a plan; `predicted` holds `communication_s` of a step.

        Raises NoPlan where the samples do not divide, or the model does not fit.
        """
        return tensor_parallel_base.plan_matmuls(profile, cluster, memory, request, Rules(), self._route, self.ends)

    def _route(self, problem: SplitProblem) -> Route:
        return problem.cheapest(baselines.data_parallel, self.ends)


def build(config: Config) -> DataParallel:
    """Returns the planner; raises `CannotRun` with what `check` finds."""
    refuse(check(config), "planner=data_parallel")
    return DataParallel(config)


def check(config: Config) -> list[Problem]:
    """Checks the values of the keys."""
    return one_of("planner.ends", config.ends, tensor_parallel_base.ENDS, "free")
