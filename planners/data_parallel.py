"""Every product split by samples alone: (P, 1, 1). What AutoDDL and Megatron are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

from harness.cluster import Cluster
from harness.interfaces import PlanRequest
from harness.memory import MemoryModel
from harness.plan import Plan
from harness.profile import ModelProfile
from harness.sbp import baselines
from harness.sbp.costs import Rules
from harness.sbp.optimum import Ends, Route
from planners import products
from planners.products import Products


@dataclass
class Config:
    """The keys of `planner=data_parallel`."""

    splits_products: ClassVar[bool] = True  # and asks for no layer times

    name: str = "data_parallel"
    """The planner."""
    ends: str = "free"
    """As of planner=autoddl; it costs the same."""


class DataParallel:
    """Weights are whole everywhere; only their gradients are sent."""

    def __init__(self, config: Config) -> None:
        self.ends = cast(Ends, config.ends)

    def plan(self, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest) -> Plan:
        """`predicted` holds `communication_s` of a step. Raises NoPlan where the samples do not divide, or it is too
        large."""
        return products.planned(profile, cluster, memory, request, Rules(), self._route, self.ends)

    def _route(self, found: Products) -> Route:
        return baselines.data_parallel(found.chain, found.costs, self.ends, found.limit)


def build(config: Config) -> DataParallel:
    """The planner; raises ValueError as `check` does."""
    check(config)
    return DataParallel(config)


def check(config: Config) -> None:
    """Raise ValueError for a value that no run can have."""
    if config.ends not in products.ENDS:
        raise ValueError(f"planner.ends {config.ends}   is none of {', '.join(products.ENDS)}   -> planner.ends=free")
