"""The planner `balance`: consecutive stages that minimize the largest time, memory or parameters of a stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan
from harness.core.problem import Problem, refuse
from harness.core.value_checks import one_of
from harness.interfaces import PlanRequest, Searched
from planners import block_partition, pipeline, stage_costs

BY = ("time", "memory", "parameters")
METHODS = ("exact", "barany_grinberg")


@dataclass
class Config:
    """The keys of `planner=balance`."""

    SEARCHED: ClassVar[dict[str, Searched]] = {"by": Searched(("time", "memory"), "pipeline")}

    name: str = "balance"
    """The planner."""
    by: str = "time"
    """The cost that is balanced: time (seconds for a micro-batch), memory (bytes at the peak) or parameters (bytes)."""
    method: str = "exact"
    """exact: the smallest possible largest cost of a stage, transfers and skips included; barany_grinberg: the
    heuristic of torchgpipe."""


class Balance:
    """`exact` counts copies and skips. `barany_grinberg` balances the layers' own costs, as torchgpipe did."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def plan(self, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest) -> Plan:
        """Returns a plan; `predicted` holds `stage_cost`, in the unit of `planner.by`, and `balance`, its mean / its
        maximum.

        Raises NoPlan for more stages than layers, and by time for a profile without times.
        """
        pipeline.check_request(profile, request)
        costs = self._costs(profile, cluster, memory, request)
        if self.config.method == "exact":
            sizes = block_partition.exact(costs.stages, stage_costs.sent_bytes(profile))
        else:
            sizes = block_partition.barany_grinberg(costs.layers, len(request.devices))
        stage_cost = costs.for_sizes(sizes)
        largest = max(stage_cost)
        balance = sum(stage_cost) / len(stage_cost) / largest if largest else 1.0
        return pipeline.to_plan(sizes, request, {"stage_cost": stage_cost, "balance": balance})

    def _costs(
        self, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest
    ) -> stage_costs.StageCosts:
        if self.config.by == "time":
            return stage_costs.by_time(profile, cluster, request)
        if self.config.by == "memory":
            return stage_costs.by_memory(profile, memory, request)
        return stage_costs.by_parameters(profile, request)


def build(config: Config) -> Balance:
    """Returns the planner; raises CannotRun, which names every key with an unknown value."""
    refuse(check(config), "planner=balance")
    return Balance(config)


def check(config: Config) -> list[Problem]:
    """Checks the values of the keys."""
    return one_of("planner.by", config.by, BY) + one_of("planner.method", config.method, METHODS)
