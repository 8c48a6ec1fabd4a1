"""The gpipe engine: what it can do, what it refuses, its schedule."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan
from harness.core.problem import Problem
from harness.core.value_checks import one_of
from harness.interfaces import Capabilities, Engine, Model, Searched, Session, SessionSpec
from harness.schedule import Schedule
from harness.schedule.builders.gpipe import RECOMPUTE, gpipe
from harness.schedule.frozen_stages import without_frozen
from harness.schedule.tied_weight_ops import plan_ties, with_ties
from harness.schedule.transfers import plan_transfers


@dataclass
class Config:
    SEARCHED: ClassVar[dict[str, Searched]] = {"checkpoint": Searched(RECOMPUTE)}

    name: str = "gpipe"
    """The engine."""
    checkpoint: str = "except_last"
    """Which micro-batches are recomputed in the backward pass: always, except_last or never."""
    dependency: bool = True
    """Insert fork and join between micro-batches, so that the backward pass has a fixed order. false: autograd chooses
    it."""
    streams: bool = True
    """Copy between devices on separate queues. false: a copy occupies the compute queues of both devices."""
    portals: bool = True
    """Send a skip tensor directly to the stage that pops it. false: it is copied through every stage in between."""
    deferred_batch_norm: bool = False
    """Batch norm updates its running statistics once for the whole mini-batch, not for each micro-batch."""


def check(config: Config) -> list[Problem]:
    """Values that no run can have."""
    return one_of("engine.checkpoint", config.checkpoint, RECOMPUTE, "except_last")


def build(config: Config) -> GPipeEngine:
    return GPipeEngine(config)


class GPipeEngine(Engine):
    capabilities = Capabilities(compiled=True, grad_scaler=True)

    def __init__(self, config: Config) -> None:
        self.config = config

    def schedule(self, plan: Plan, profile: ModelProfile) -> Schedule:
        schedule = gpipe(
            plan.micro_batches,
            [stage.device for stage in plan.stages],
            plan_transfers(plan, profile, self.config.portals),
            plan.recompute,
            self.config.dependency,
            self.config.streams,
        )
        schedule = with_ties(schedule, plan_ties(plan, profile), "copy in" if self.config.streams else "compute")
        return without_frozen(schedule, plan, profile)

    def session(self, model: Model, plan: Plan, spec: SessionSpec) -> AbstractContextManager[Session]:
        from engines.gpipe.session import GPipeSession

        return GPipeSession(model, plan, spec, self.config)
