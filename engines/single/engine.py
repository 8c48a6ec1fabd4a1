"""The single engine: one device, gradient accumulation over micro-batches, checkpointing by torch.

With one micro-batch and without checkpointing it is the papers' Naive-1. It shares no code with the pipelines, so that
it can be their oracle.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan
from harness.core.problem import Problem
from harness.core.value_checks import at_least, one_of
from harness.interfaces import Capabilities, Engine, Model, Searched, Session, SessionSpec
from harness.schedule import Schedule
from harness.schedule.builders.gpipe import RECOMPUTE
from harness.schedule.builders.single import single


@dataclass
class Config:
    SEARCHED: ClassVar[dict[str, Searched]] = {"checkpoint": Searched(RECOMPUTE)}

    name: str = "single"
    """The engine."""
    checkpoint: str = "never"
    """Which micro-batches are recomputed in the backward pass: always, except_last or never."""
    deferred_batch_norm: bool = False
    """Batch norm updates its running statistics once for the whole mini-batch, not for each micro-batch."""
    threads: int = 1
    """Intra-op threads on a CPU device; 0: one for each core."""


def check(config: Config) -> list[Problem]:
    """Values that no run can have."""
    checkpoint = one_of("engine.checkpoint", config.checkpoint, RECOMPUTE, "never")
    return [*checkpoint, *at_least("engine.threads", config.threads, 0, fix=1, why="0 is for all cores")]


def build(config: Config) -> SingleEngine:
    return SingleEngine(config)


class SingleEngine(Engine):
    capabilities = Capabilities(pipeline=False, compiled=True, grad_scaler=True, cuda_graphs=True)

    def __init__(self, config: Config) -> None:
        self.config = config

    def check(self, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> list[Problem]:
        if len(plan.stages) == 1:
            return []
        return [Problem("mesh.pipeline", len(plan.stages), "engine=single has 1 stage", ({"mesh.pipeline": 1},))]

    def schedule(self, plan: Plan, profile: ModelProfile) -> Schedule:
        return single(plan.micro_batches, plan.recompute)

    def session(self, model: Model, plan: Plan, spec: SessionSpec) -> AbstractContextManager[Session]:
        from engines.single.session import SingleSession

        return SingleSession(model, plan, spec, self.config)
