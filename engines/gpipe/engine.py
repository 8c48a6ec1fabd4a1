"""The gpipe engine: what it can do, what it refuses, its schedule."""

from __future__ import annotations

from contextlib import AbstractContextManager

from engines.gpipe.config import Config
from harness.interfaces import Capabilities, Engine, Model, Session, SessionSpec
from harness.plan import Plan
from harness.profile import ModelProfile
from harness.schedule import Schedule
from harness.schedule.gpipe import gpipe
from harness.schedule.hops import plan_hops
from harness.schedule.ties import plan_ties, with_ties


class GPipeEngine(Engine):
    capabilities = Capabilities()

    def __init__(self, config: Config) -> None:
        self.config = config

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

    def session(self, model: Model, plan: Plan, spec: SessionSpec) -> AbstractContextManager[Session]:
        from engines.gpipe.session import GPipeSession

        return GPipeSession(model, plan, spec, self.config)
