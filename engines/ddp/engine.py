"""The ddp engine: torch.nn.parallel.DistributedDataParallel over all devices.

Gradients are accumulated over a replica's micro-batches and summed once, in buckets, while the last backward pass goes
on. The schedule has them after that pass: a prediction is too slow by as much as really overlaps.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Mesh, Plan
from harness.core.problem import Problem
from harness.core.value_checks import above_0
from harness.interfaces import Capabilities, Engine, Model, Session, SessionSpec
from harness.schedule import Schedule
from harness.schedule.builders.data_parallel import data_parallel


@dataclass
class Config:
    name: str = "ddp"
    """The engine."""
    bucket_mb: float = 25.0
    """Size of a gradient bucket in MiB. Each bucket is all-reduced while the backward pass continues."""


def check(config: Config) -> list[Problem]:
    """Values that no run can have."""
    return above_0("engine.bucket_mb", config.bucket_mb, 25)


def build(config: Config) -> DDPEngine:
    return DDPEngine(config)


class DDPEngine(Engine):
    capabilities = Capabilities(pipeline=False, data=True, multi_process=True, compiled=True, grad_scaler=True)

    def __init__(self, config: Config) -> None:
        self.config = config

    def schedule(self, plan: Plan, profile: ModelProfile) -> Schedule:
        return data_parallel(plan.micro_batches, profile.trained_bytes(), plan.mesh.data, recompute=plan.recompute)

    def memory(self, model: MemoryModel, mesh: Mesh, profile: ModelProfile) -> MemoryModel:
        """After the first step DDP makes its buckets in the order in which gradients came, unless some may not come."""
        partial = profile.by_value or any(layer.traits.unused for layer in profile.layers)
        return model if partial or mesh.data == 1 else replace(model, rebuilt=model.gradients)

    def session(self, model: Model, plan: Plan, spec: SessionSpec) -> AbstractContextManager[Session]:
        from engines.ddp.session import DDPSession

        return DDPSession(model, plan, spec, self.config)
