"""Consecutive stages whose largest cost is least: of time, of memory or of parameters."""

from __future__ import annotations

from dataclasses import dataclass

from harness.cluster import Cluster
from harness.interfaces import PlanRequest
from harness.memory import MemoryModel
from harness.plan import Plan
from harness.problem import CannotRun, Problem
from harness.profile import ModelProfile
from planners import blocks, stage_costs, stages

BY = ("time", "memory", "parameters")
METHODS = ("exact", "barany_grinberg")


@dataclass
class Config:
    """The keys of `planner=balance`."""

    name: str = "balance"
    """The planner."""
    by: str = "time"
    """What a stage costs: time (seconds for a micro-batch), memory (bytes at the peak) or parameters (bytes)."""
    method: str = "exact"
    """exact: the least possible largest cost, with copies and skips; barany_grinberg: the heuristic of torchgpipe."""


class Balance:
    """`exact` sees copies and skips. `barany_grinberg` cuts the layers' own costs, as torchgpipe did."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def plan(self, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest) -> Plan:
        """`predicted` holds `stage_cost`, in the unit of `planner.by`, and `balance`, its mean / its maximum.

        Raises NoPlan for more stages than layers, and by time for a profile without times.
        """
        stages.check_request(profile, request)
        costs = self._costs(profile, cluster, memory, request)
        if self.config.method == "exact":
            sizes = blocks.exact(costs.stages, stage_costs.sent_bytes(profile))
        else:
            sizes = blocks.barany_grinberg(costs.layers, len(request.devices))
        stage_cost = costs.of(sizes)
        largest = max(stage_cost)
        balance = sum(stage_cost) / len(stage_cost) / largest if largest else 1.0
        return stages.to_plan(sizes, request, {"stage_cost": stage_cost, "balance": balance})

    def _costs(
        self, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest
    ) -> stage_costs.StageCosts:
        if self.config.by == "time":
            return stage_costs.by_time(profile, cluster, request)
        if self.config.by == "memory":
            return stage_costs.by_memory(profile, memory, request)
        return stage_costs.by_parameters(profile, request)


def build(config: Config) -> Balance:
    """The planner; raises CannotRun that names every key whose value is unknown."""
    problems = _problems(config)
    if problems:
        raise CannotRun(problems, "planner=balance")
    return Balance(config)


def check(config: Config) -> None:
    """Raise ValueError with a line for each key whose value is unknown."""
    problems = _problems(config)
    if problems:
        raise ValueError("\n".join(f"{p.key}   {p.what}   -> {p.mend}" for p in problems))


def _problems(config: Config) -> list[Problem]:
    choices = (("planner.by", config.by, BY), ("planner.method", config.method, METHODS))
    return [
        Problem(f"{key} {value}", f"is none of {', '.join(known)}", f"{key}={known[0]}")
        for key, value, known in choices
        if value not in known
    ]
