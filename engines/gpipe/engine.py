"""The gpipe engine: what it can do, what it refuses, its schedule."""

from __future__ import annotations

from contextlib import AbstractContextManager

from engines.gpipe.config import Config
from harness.cluster import Cluster
from harness.interfaces import Capabilities, Model, Session, SessionSpec
from harness.memory import MemoryModel
from harness.mesh import Mesh
from harness.plan import Plan
from harness.problem import Problem
from harness.profile import ModelProfile
from harness.schedule import Schedule
from harness.schedule.gpipe import gpipe
from harness.schedule.hops import plan_hops
from harness.schedule.ties import plan_ties, with_ties


class GPipeEngine:
    capabilities = Capabilities()

    def __init__(self, config: Config) -> None:
        self.config = config

    def check(self, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> list[Problem]:
        return []

    def schedule(self, plan: Plan, profile: ModelProfile) -> Schedule:
        schedule = gpipe(
            plan.micro_batches,
            [stage.device for stage in plan.stages],
            plan_hops(plan, profile, self.config.portals),
            plan.recompute,
            self.config.dependency,
            self.config.streams,
        )
        return with_ties(schedule, plan_ties(plan, profile), "copy in" if self.config.streams else "compute")

    def placement(self, pipeline: int) -> tuple[int, ...]:
        return ()

    def memory(self, model: MemoryModel, mesh: Mesh, profile: ModelProfile) -> MemoryModel:
        return model

    def session(self, model: Model, plan: Plan, spec: SessionSpec) -> AbstractContextManager[Session]:
        from engines.gpipe.session import GPipeSession

        return GPipeSession(model, plan, spec, self.config)
