"""DeepSpeed's own cut of a model into stages (deepspeed.runtime.utils, version 0.19), for any engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.cluster import Cluster
from harness.interfaces import PlanRequest
from harness.memory import MemoryModel
from harness.plan import Plan
from harness.problem import CannotRun, Problem
from harness.profile import ModelProfile
from planners import blocks, stage_costs, stages

BY = ("parameters", "uniform")


@dataclass
class Config:
    """The keys of `planner=deepspeed`."""

    name: str = "deepspeed"
    """The planner."""
    by: str = "parameters"
    """What is cut evenly: parameters, DeepSpeed's default, or uniform: the number of layers."""


class DeepSpeed:
    """`PipelineModule(partition_method=...)`; it sees neither time nor copies nor skips."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def plan(self, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest) -> Plan:
        """`predicted` by parameters: `stage_cost`, the bytes of each stage, and `balance`, their mean / their maximum.

        Raises NoPlan for more stages than layers.
        """
        stages.check_request(profile, request)
        count = len(request.devices)
        if self.config.by == "uniform":
            return stages.to_plan(blocks.even(len(profile.layers), count), request, {})
        sizes = closest([layer.param_bytes for layer in profile.layers], count)
        stage_cost = stage_costs.by_parameters(profile, request).of(sizes)
        largest = max(stage_cost)
        balance = sum(stage_cost) / len(stage_cost) / largest if largest else 1.0
        return stages.to_plan(sizes, request, {"stage_cost": stage_cost, "balance": balance})


def closest(weights: Sequence[float], parts: int) -> list[int]:
    """Sizes of consecutive, non-empty parts whose largest and smallest sum should be close (`partition_balanced`).

    weights   0 ....... cut ....... end ...
              <- part parts -><-part->             best way to each cut + the part behind it

    For each end only one way is kept, the one with the least difference so far, and of equals the one with the last
    cut. A way that is worse so far may end better, so this finds neither the least difference nor the least maximum in
    every case, and it is not meant to: it is what DeepSpeed does.
    """
    reach = np.concatenate(([0.0], np.cumsum(weights)))
    largest, smallest = np.full_like(reach, np.inf), np.full_like(reach, np.inf)
    largest[0] = 0.0  # the only way to cut nothing into no parts
    cuts = []
    for part in range(1, parts + 1):
        next_largest, next_smallest = np.full_like(reach, np.inf), np.full_like(reach, np.inf)
        cut = np.zeros(len(reach), dtype=np.int64)
        for end in range(part, len(reach)):
            own = reach[end] - reach[:end]
            most, least = np.maximum(largest[:end], own), np.minimum(smallest[:end], own)
            best = end - 1 - int(np.argmin((most - least)[::-1]))
            cut[end], next_largest[end], next_smallest[end] = best, most[best], least[best]
        largest, smallest = next_largest, next_smallest
        cuts.append(cut)
    return _sizes(cuts, len(weights))


def _sizes(cuts: Sequence[np.ndarray], end: int) -> list[int]:
    """Follow the cuts from the last part to the first."""
    sizes = []
    for cut in reversed(cuts):
        sizes.append(end - int(cut[end]))
        end = int(cut[end])
    return sizes[::-1]


def build(config: Config) -> DeepSpeed:
    """The planner; raises CannotRun for an unknown `planner.by`."""
    if problem := _problem(config):
        raise CannotRun([problem], "planner=deepspeed")
    return DeepSpeed(config)


def check(config: Config) -> None:
    """Raise ValueError with a line for an unknown `planner.by`."""
    if p := _problem(config):
        raise ValueError(f"{p.key}   {p.what}   -> {p.mend}")


def _problem(config: Config) -> Problem | None:
    if config.by in BY:
        return None
    return Problem(f"planner.by {config.by}", f"is none of {', '.join(BY)}", f"planner.by={BY[0]}")
