"""The ddp engine: torch.nn.parallel.DistributedDataParallel over all devices.

Gradients are accumulated over a replica's micro-batches and summed once, in buckets, while the last backward pass goes
on. The schedule has them behind that pass: a prediction is too slow by as much as really overlaps.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from engines.ddp.config import Config
from harness.interfaces import Capabilities, Engine, Model, Session, SessionSpec
from harness.plan import Plan
from harness.profile import ModelProfile
from harness.schedule import Schedule
from harness.schedule.zero import data_parallel


class DDPEngine(Engine):
    capabilities = Capabilities(pipeline=False, data=True, ranks=True)

    def __init__(self, config: Config) -> None:
        self.config = config

    def schedule(self, plan: Plan, profile: ModelProfile) -> Schedule:
        size = profile.parameter_bytes(0, len(profile.layers) - 1)
        return data_parallel(plan.micro_batches, size, plan.mesh.data, "all_reduce", plan.recompute)

    def session(self, model: Model, plan: Plan, spec: SessionSpec) -> AbstractContextManager[Session]:
        from engines.ddp.session import DDPSession

        return DDPSession(model, plan, spec, self.config)
