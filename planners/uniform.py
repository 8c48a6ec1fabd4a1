"""Equal numbers of layers for every stage."""

from __future__ import annotations

from dataclasses import dataclass

from harness.cluster import Cluster
from harness.interfaces import PlanRequest
from harness.memory import MemoryModel
from harness.plan import Plan
from harness.profile import ModelProfile
from planners import stages
from planners.blocks import even


@dataclass
class Config:
    """The keys of `planner=uniform`."""

    name: str = "uniform"
    """The planner."""


class Uniform:
    """Stage j gets n // p of the n layers, the first n % p stages one more."""

    def plan(self, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest) -> Plan:
        """Raises NoPlan for more stages than layers."""
        stages.check_request(profile, request)
        return stages.to_plan(even(len(profile.layers), len(request.devices)), request, {})


def build(config: Config) -> Uniform:
    """The planner."""
    return Uniform()
