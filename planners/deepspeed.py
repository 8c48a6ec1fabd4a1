"""The planner `deepspeed`: DeepSpeed's partition into stages (deepspeed.runtime.utils, version 0.19), for any
engine."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from harness.core.cluster import Cluster
from harness.core.deepspeed_partition import partition_balanced
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan
from harness.core.problem import Problem, refuse
from harness.core.value_checks import one_of
from harness.interfaces import PlanRequest
from planners import block_partition, pipeline

BY = ("parameters", "uniform")


@dataclass
class Config:
    """The keys of `planner=deepspeed`."""

    name: str = "deepspeed"
    """The planner."""
    by: str = "parameters"
    """The cost that is balanced: parameters that are trained (DeepSpeed's default) or uniform (number of layers)."""


class DeepSpeed:
    """`PipelineModule(partition_method=...)`; it ignores time, copies and skips."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def plan(self, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest) -> Plan:
        """Returns a plan; `predicted` by parameters: `stage_cost`, the bytes of each stage, and `balance`, their mean /
        their maximum.

        Raises NoPlan for more stages than layers.
        """
        pipeline.check_request(profile, request)
        count = len(request.devices)
        if self.config.by == "uniform":
            return pipeline.to_plan(block_partition.even(len(profile.layers), count), request, {})
        sizes = partition_balanced([layer.trained_bytes for layer in profile.layers], count)
        lasts = accumulate(sizes)
        stage_cost = [float(profile.trained_bytes(end - size, end - 1)) for end, size in zip(lasts, sizes, strict=True)]
        largest = max(stage_cost)
        balance = sum(stage_cost) / len(stage_cost) / largest if largest else 1.0
        return pipeline.to_plan(sizes, request, {"stage_cost": stage_cost, "balance": balance})


def build(config: Config) -> DeepSpeed:
    """Returns the planner; raises CannotRun for an unknown `planner.by`."""
    refuse(check(config), "planner=deepspeed")
    return DeepSpeed(config)


def check(config: Config) -> list[Problem]:
    """Checks the values of the keys."""
    return one_of("planner.by", config.by, BY)
