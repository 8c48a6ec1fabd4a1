"""SUMMA on the best mesh r x c: inputs go along rows, weights along columns (a cost model, as in AutoDDL's figures)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from harness.cluster import Cluster
from harness.interfaces import PlanRequest
from harness.memory import MemoryModel
from harness.plan import Plan, Traffic
from harness.profile import ModelProfile
from harness.sbp import baselines
from harness.sbp.costs import Rules
from planners import products, stages

SHARES = {"forward": 1 / 3, "backward": 2 / 3}


@dataclass
class Config:
    """The keys of `planner=summa`."""

    splits_products: ClassVar[bool] = True  # and asks for no layer times

    name: str = "summa"
    """The planner."""


class Summa:
    """It splits no product as a strategy says, so that no engine runs it."""

    def plan(self, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest) -> Plan:
        """`predicted` holds `communication_s` of a step and the mesh. Raises NoPlan as all planners of products do."""
        found = products.products(profile, cluster, memory, request, Rules())
        best = baselines.summa(found.chain, found.costs)
        size, m = found.costs.grid.size, request.batch.micro_batches
        traffic = tuple(
            Traffic("all_gather", phase, share * best.seconds / m, round(share * best.bytes / m))
            for phase, share in SHARES.items()
        )
        predicted = {
            "communication_s": best.seconds,
            "communication_by_phase_s": {phase: share * best.seconds for phase, share in SHARES.items()},
            "held_bytes": round(found.evenly),
            "summa_mesh": [size(best.rows), size(best.columns)],
            "baselines": products.compared(found, "free"),
        }
        plan = stages.to_plan([len(profile.layers)], request, predicted)
        return replace(plan, traffic=(traffic,))


def build(config: Config) -> Summa:
    """The planner."""
    return Summa()
