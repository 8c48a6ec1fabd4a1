"""The planner `summa`: SUMMA on the best mesh rows x columns (AutoDDL's baseline, section 5.1; `harness.sbp.summa`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan
from harness.interfaces import PlanRequest
from harness.sbp import baselines
from harness.sbp.shortest_path import Route
from harness.sbp.strategy_costs import Rules
from planners import tensor_parallel_base
from planners.tensor_parallel_base import SplitProblem


@dataclass
class Config:
    """The keys of `planner=summa`."""

    splits_matmuls: ClassVar[bool] = True  # and asks for no layer times

    name: str = "summa"
    """The planner."""
    padded: bool = False
    """true: sizes of weights need not divide (planning only), as with planner=megatron."""


class Summa:
    def __init__(self, config: Config) -> None:
        self.rules = Rules(padded=config.padded)

    def plan(self, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest) -> Plan:
        """Returns a plan; `predicted` holds `communication_s` of a step. Raises NoPlan if no mesh divides all matmuls,
        or fits."""
        return tensor_parallel_base.plan_matmuls(profile, cluster, memory, request, self.rules, _cheapest)


def _cheapest(problem: SplitProblem) -> Route:
    return problem.cheapest(baselines.summa, "free")


def build(config: Config) -> Summa:
    """Returns the planner."""
    return Summa(config)
