"""The planner `megatron`: Megatron-LM's tensor parallelism, matmuls in pairs on a mesh d x m (DP x TP).

The first matmul of a pair is split by columns (d, m, 1), the second by rows (d, 1, m). The planner takes the best mesh
(`planner.dimensions=2`), or all devices split weights (1). Convolutions are data parallel. Where nodes have several
devices, m devices of one node split weights: the best number, or all of a node (`planner.mesh=node`). With one
dimension a vocabulary need not divide: Megatron-LM pads it; with two dimensions `planner.padded` says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan
from harness.core.problem import Problem, refuse
from harness.core.value_checks import one_of
from harness.interfaces import PlanRequest
from harness.sbp import baselines
from harness.sbp.matmul_chain import Chain
from harness.sbp.shortest_path import Ends, Route
from harness.sbp.strategy_costs import Costs, Rules
from planners import tensor_parallel_base
from planners.tensor_parallel_base import SplitProblem


@dataclass
class Config:
    """The keys of `planner=megatron`."""

    splits_matmuls: ClassVar[bool] = True  # and asks for no layer times

    name: str = "megatron"
    """The planner."""
    dimensions: int = 2
    """2: the best mesh of data and tensor parallel sizes; 1: tensor parallel only."""
    mesh: str = "best"
    """With planner.dimensions=2, on nodes of several devices. best: any number of a node's devices split weights; node:
    all of them do, so that intermediate results stay inside of nodes and weights' gradients go across (AutoDDL, Sec.
    5)."""
    padded: bool = False
    """true: with planner.dimensions=2, too, sizes of weights need not divide, as Megatron-LM pads them (planning only).
    What padding adds is not counted."""
    ends: str = "free"
    """The same as with planner=autoddl."""


class Megatron:
    def __init__(self, config: Config) -> None:
        self.config, self.two, self.ends = config, config.dimensions == 2, cast(Ends, config.ends)
        self.rules = Rules(padded=config.padded or not self.two)

    def plan(self, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest) -> Plan:
        """Returns a plan; `predicted` holds `communication_s` of a step. Raises NoPlan if no mesh divides all matmuls,
        or fits."""
        return tensor_parallel_base.plan_matmuls(profile, cluster, memory, request, self.rules, self._route, self.ends)

    def _route(self, problem: SplitProblem) -> Route:
        return problem.cheapest(self._routes, self.ends)

    def _routes(self, chain: Chain, costs: Costs, ends: Ends) -> list[Route]:
        meshes = baselines.meshes(costs.grid, self.two, whole_nodes=self.config.mesh == "node")
        return baselines.megatron(chain, costs, ends, meshes)


def build(config: Config) -> Megatron:
    """Returns the planner; raises `CannotRun` with what `check` finds."""
    refuse(check(config), "planner=megatron")
    return Megatron(config)


def check(config: Config) -> list[Problem]:
    """Checks the values of the keys."""
    dimensions = one_of("planner.dimensions", config.dimensions, (1, 2), 2)
    dimensions += one_of("planner.mesh", config.mesh, ("best", "node"), "best")
    return dimensions + one_of("planner.ends", config.ends, tensor_parallel_base.ENDS, "free")
