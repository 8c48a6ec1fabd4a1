"""Settings of an engine side by side on one profile: engine=pipeline engine.schedule=all."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from harness.checks import plan_fits
from harness.config import registry
from harness.core.cluster import Cluster
from harness.core.model_profile import ModelProfile
from harness.core.problem import CannotRun, ProblemError
from harness.interfaces import Engine, Planner
from harness.planning import draft as planning_draft
from harness.planning.draft import Draft


@dataclass(frozen=True)
class Alternative:
    """A setting, planned and simulated; or why it is refused. `step_s` and `bubble` are with the run's jitter."""

    name: str
    draft: Draft | None = None
    engine: Engine | None = None
    refused: str = ""
    step_s: float = float("inf")
    bubble: float = 0.0

    @property
    def peak_bytes(self) -> int:
        """The memory of the fullest device."""
        return max(self.draft.plan.predicted["peak_memory_bytes"]) if self.draft else 0


def compared(
    config: DictConfig, engine: Engine, planner: Planner, profile: ModelProfile, cluster: Cluster
) -> list[Alternative]:
    """Plan and simulate each of the engine's alternatives; those that fit come first, the fastest at the head."""
    found = [_one(config, name, changes, planner, profile, cluster) for name, changes in engine.alternatives().items()]
    return sorted(found, key=lambda one: (bool(one.refused), one.step_s, one.peak_bytes))


def _one(
    config: DictConfig, name: str, changes: dict[str, object], planner: Planner, profile: ModelProfile, cluster: Cluster
) -> Alternative:
    changed = config.copy()
    for key, value in changes.items():
        OmegaConf.update(changed, key, value)
    try:
        engine: Engine = registry.build("engine", changed.engine)
        draft = planning_draft.draft(changed, engine, planner, profile, cluster)
    except (CannotRun, ProblemError) as error:
        first = error.problems[0]
        return Alternative(name, refused=f"{first.subject} {first.message}")
    figures = draft.disturbed(config.jitter, config.seed).figures
    full = plan_fits.check_memory(draft.plan, draft.plan.predicted["peak_memory_bytes"], draft.cluster, draft.memory)
    refused = "does not fit" if full else ""
    return Alternative(name, draft, engine, refused, figures["step_time_s"], figures["bubble_fraction"])
