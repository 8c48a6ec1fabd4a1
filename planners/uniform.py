"""The planner `uniform`: equal numbers of layers for every stage."""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan
from harness.interfaces import PlanRequest
from planners import pipeline
from planners.block_partition import even


@dataclass
class Config:
    """The keys of `planner=uniform`."""

    name: str = "uniform"
    """The planner."""


class Uniform:
    """Stage j gets n // p of the n layers, the first n % p stages one more."""

    def plan(self, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest) -> Plan:
        """Returns a plan. Raises NoPlan for more stages than layers."""
        pipeline.check_request(profile, request)
        return pipeline.to_plan(even(len(profile.layers), len(request.devices)), request, {})


def build(config: Config) -> Uniform:
    """Returns the planner."""
    return Uniform()
