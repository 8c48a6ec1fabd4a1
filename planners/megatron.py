"""Megatron-LM's tensor parallelism: products in pairs on a mesh d x m, by columns (d, m, 1), then by rows (d, 1, m).

The best mesh is taken (`planner.dimensions=2`), or all devices split weights (1). Convolutions are data parallel. Where
nodes have several devices, m of one node split weights. With one dimension a vocabulary need not divide, which
Megatron-LM pads.
"""

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
    """The keys of `planner=megatron`."""

    splits_products: ClassVar[bool] = True  # and asks for no layer times

    name: str = "megatron"
    """The planner."""
    dimensions: int = 2
    """2: the best mesh of replicas and shards; 1: shards only."""
    ends: str = "free"
    """As of planner=autoddl."""


class Megatron:
    def __init__(self, config: Config) -> None:
        self.two, self.ends = config.dimensions == 2, cast(Ends, config.ends)
        self.rules = Rules(padded=not self.two)

    def plan(self, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest) -> Plan:
        """`predicted` holds `communication_s` of a step. Raises NoPlan where no mesh divides all products, or fits."""
        return products.planned(profile, cluster, memory, request, self.rules, self._route, self.ends)

    def _route(self, found: Products) -> Route:
        return baselines.megatron(found.chain, found.costs, self.ends, self.two, found.limit)


def build(config: Config) -> Megatron:
    """The planner; raises ValueError as `check` does."""
    check(config)
    return Megatron(config)


def check(config: Config) -> None:
    """Raise ValueError with a line for each value that no run can have."""
    wrong = []
    if config.dimensions not in (1, 2):
        wrong.append(f"planner.dimensions {config.dimensions}   is none of 1, 2   -> planner.dimensions=2")
    if config.ends not in products.ENDS:
        wrong.append(f"planner.ends {config.ends}   is none of {', '.join(products.ENDS)}   -> planner.ends=free")
    if wrong:
        raise ValueError("\n".join(wrong))
