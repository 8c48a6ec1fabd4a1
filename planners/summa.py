"""The planner `summa`: SUMMA on the best mesh r x c, inputs go along rows, weights along columns (a cost model, as in
AutoDDL's figures)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan, Traffic
from harness.interfaces import PlanRequest
from harness.sbp import baselines
from harness.sbp.strategy_costs import Rules
from planners import pipeline, tensor_parallel_base

SHARES = {"forward": 1 / 3, "backward": 2 / 3}


@dataclass
class Config:
    """The keys of `planner=summa`."""

    splits_matmuls: ClassVar[bool] = True  # and asks for no layer times

    name: str = "summa"
    """The planner."""


class Summa:
    """A cost model only: SUMMA does not split matmuls by a strategy, so no engine runs it."""

    def plan(self, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest) -> Plan:
        """Returns a plan; `predicted` holds `communication_s` of a step and the mesh. Raises NoPlan as `split_problem`
        does."""
        problem = tensor_parallel_base.split_problem(profile, cluster, memory, request, Rules())
        best = baselines.summa(problem.chain, problem.costs)
        size, m = problem.costs.grid.size, request.batch.micro_batches
        traffic = tuple(
            Traffic("all_gather", phase, share * best.seconds / m, round(share * best.bytes / m))
            for phase, share in SHARES.items()
        )
        predicted = {
            "communication_s": best.seconds,
            "communication_by_phase_s": {phase: share * best.seconds for phase, share in SHARES.items()},
            "held_bytes": round(problem.evenly),
            "summa_mesh": [size(best.rows), size(best.columns)],
            "baselines": tensor_parallel_base.compare_baselines(problem, "free"),
        }
        plan = pipeline.to_plan([len(profile.layers)], request, predicted)
        return replace(plan, traffic=(traffic,))


def build(config: Config) -> Summa:
    """Returns the planner."""
    return Summa()
