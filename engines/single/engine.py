"""The single engine: one device, gradient accumulation over micro-batches, checkpointing by torch.

With one micro-batch and without checkpointing it is the papers' Naive-1. It shares no code with the pipelines, so that
it can be their oracle.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from engines.single.config import Config
from harness.cluster import Cluster
from harness.interfaces import Capabilities, Engine, Model, Session, SessionSpec
from harness.memory import MemoryModel
from harness.plan import Plan
from harness.problem import Problem
from harness.profile import ModelProfile
from harness.schedule import Schedule
from harness.schedule.single import single


class SingleEngine(Engine):
    capabilities = Capabilities(pipeline=False)

    def __init__(self, config: Config) -> None:
        self.config = config

    def check(self, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> list[Problem]:
        if len(plan.stages) == 1:
            return []
        return [Problem(f"mesh.pipeline {len(plan.stages)}", "engine=single has 1 stage", "mesh.pipeline=1")]

    def schedule(self, plan: Plan, profile: ModelProfile) -> Schedule:
        return single(plan.micro_batches, plan.recompute)

    def session(self, model: Model, plan: Plan, spec: SessionSpec) -> AbstractContextManager[Session]:
        from engines.single.session import SingleSession

        return SingleSession(model, plan, spec, self.config)
