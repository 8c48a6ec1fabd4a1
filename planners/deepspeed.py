"""The planner `deepspeed`: DeepSpeed's partition into stages (deepspeed.runtime.utils, version 0.19), for any
engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan
from harness.core.problem import Problem, refuse
from harness.core.value_checks import one_of
from harness.interfaces import PlanRequest
from planners import block_partition, pipeline, stage_costs

BY = ("parameters", "uniform")


@dataclass
class Config:
    """The keys of `planner=deepspeed`."""

    name: str = "deepspeed"
    """The planner."""
    by: str = "parameters"
    """The cost that is balanced: parameters (DeepSpeed's default) or uniform (number of layers)."""


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
        sizes = partition_balanced([layer.param_bytes for layer in profile.layers], count)
        stage_cost = stage_costs.by_parameters(profile, request).for_sizes(sizes)
        largest = max(stage_cost)
        balance = sum(stage_cost) / len(stage_cost) / largest if largest else 1.0
        return pipeline.to_plan(sizes, request, {"stage_cost": stage_cost, "balance": balance})


def partition_balanced(weights: Sequence[float], parts: int) -> list[int]:
    """Returns sizes of consecutive, non-empty parts with a close largest and smallest sum (as DeepSpeed's
    `partition_balanced`).

    weights   0 ....... cut ....... end ...
              <- part parts -><-part->             best partial partition up to each cut + the part after it

    For each end only one partial partition is kept, the one with the least difference so far, and of equals the one
    with the last cut. A worse one may end better, so this finds neither the least difference nor the least maximum in
    every case, exactly as DeepSpeed.
    """
    reach = np.concatenate(([0.0], np.cumsum(weights)))
    largest, smallest = np.full_like(reach, np.inf), np.full_like(reach, np.inf)
    largest[0] = 0.0  # no elements in no parts
    cuts = []
    for part in range(1, parts + 1):
        next_largest, next_smallest = np.full_like(reach, np.inf), np.full_like(reach, np.inf)
        cut = np.zeros(len(reach), dtype=np.int64)
        for end in range(part, len(reach)):
            part_sum = reach[end] - reach[:end]
            most, least = np.maximum(largest[:end], part_sum), np.minimum(smallest[:end], part_sum)
            best = end - 1 - int(np.argmin((most - least)[::-1]))
            cut[end], next_largest[end], next_smallest[end] = best, most[best], least[best]
        largest, smallest = next_largest, next_smallest
        cuts.append(cut)
    return _sizes(cuts, len(weights))


def _sizes(cuts: Sequence[np.ndarray], end: int) -> list[int]:
    """Follows the cuts from the last part to the first."""
    sizes = []
    for cut in reversed(cuts):
        sizes.append(end - int(cut[end]))
        end = int(cut[end])
    return sizes[::-1]


def build(config: Config) -> DeepSpeed:
    """Returns the planner; raises CannotRun for an unknown `planner.by`."""
    refuse(check(config), "planner=deepspeed")
    return DeepSpeed(config)


def check(config: Config) -> list[Problem]:
    """Checks the values of the keys."""
    return one_of("planner.by", config.by, BY)
