"""The planner: chain and costs in, the best strategies out."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import cast

from harness.cluster import Cluster
from harness.interfaces import PlanRequest
from harness.memory import MemoryModel
from harness.plan import Plan
from harness.problem import NoPlan
from harness.profile import ModelProfile
from harness.sbp.costs import Paths, Rules, Splits
from harness.sbp.limit import within
from harness.sbp.optimum import Ends, Route, Search
from planners import products
from planners.autoddl.config import LARGEST, Config
from planners.autoddl.heuristics import Found, find
from planners.products import Products


class AutoDDL:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.ends = cast(Ends, config.ends)

    def plan(self, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest) -> Plan:
        """`predicted` holds `communication_s` of a step (also by phase and product), what a device holds, and what a
        search of the paper has looked at.

        Raises NoPlan where nothing divides, or nothing fits.
        """
        config, looked = self.config, list[Found]()
        rules = Rules(cast(Paths, config.paths), cast(Splits, config.splits), config.max_replicas)

        def search(products: Products) -> Route:
            looked.append(self._searched(products.search(self.ends)))
            return looked[-1].route

        exact = config.search == "exact"
        plan = products.planned(profile, cluster, memory, request, rules, self._exact if exact else search, self.ends,
                                config.memory_gb, self._exact)  # fmt: skip
        if exact:
            return plan
        told = {"evaluations": looked[-1].evaluations, "history": looked[-1].history}
        return replace(plan, predicted=plan.predicted | told)

    def _exact(self, found: Products) -> Route:
        return within(found.search(self.ends, repeat=self.config.repeat), found.limit)

    def _searched(self, search: Search) -> Found:
        """By a search of the paper. Of an exhaustive one all plans count."""
        config, evaluations = self.config, self.config.evaluations
        if config.search == "exhaustive":
            evaluations = prod(len(search.strategies(item)) for item in search.matmuls)
            if evaluations > LARGEST:
                what = f"would look at {evaluations:.3g} plans, at most {LARGEST:.0e} take minutes"
                raise NoPlan("planner.search exhaustive", what, "planner.search=exact")
        return find(search, config.search, evaluations, config.seed)
