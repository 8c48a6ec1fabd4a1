"""The prediction of a measured run by today's simulator: configuration and plan as they were, the profile that it
stored.

    figures(record)     step_time_s and peak_memory_bytes, one for each device

Files of a run have plan and profile, and so have packs that were made since packs have them (`analysis.pack`). What
today's planner would plan is no part of it: the run that was measured had its own plan.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from analysis.run_artifacts import ORIGIN, UNREADABLE
from harness.config import registry
from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan
from harness.core.problem import CannotRun
from harness.core.record import RunRecord
from harness.core.run_files import PLAN, PROFILE
from harness.interfaces import PlanRequest
from harness.planning import draft as planning_draft


class NotPredictable(Exception):
    """A record that today's simulator cannot predict; the message says why."""


@dataclass(frozen=True)
class AsBefore:
    """A planner that returns the plan of the run."""

    before: Plan

    def plan(self, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest) -> Plan:
        return self.before


def figures(record: RunRecord) -> dict[str, Any]:
    """The simulator's figures for a measured run. Raises `NotPredictable`."""
    basis = record.manifest.get("simulation", {}).get("cluster")
    if not basis:
        raise NotPredictable("the record does not say on which cluster it was predicted")
    try:
        plan, profile = _stored(record)
        cluster = Cluster.from_json(basis)
    except UNREADABLE as error:
        raise NotPredictable(f"its plan or profile cannot be read: {' '.join(str(error).split())}") from error
    config = _todays(record.config)
    try:
        engine = registry.build("engine", config.engine)
        return planning_draft.draft(config, engine, AsBefore(plan), profile, cluster).plan.predicted
    except CannotRun as error:
        first = error.problems[0].statement
        raise NotPredictable(f"it is refused today: {first}") from error
    except OmegaConfBaseException as error:
        raise NotPredictable(f"its keys are not today's: {str(error).splitlines()[0]}") from error


def _todays(keys: dict[str, Any]) -> DictConfig:
    """The keys of a run; those that came after it have their defaults, which leave runs as they were."""
    choices = {group: part["name"] for group, part in keys.items() if isinstance(part, dict) and part.get("name")}
    found = OmegaConf.merge(OmegaConf.create(registry.default_keys(choices)), OmegaConf.create(copy.deepcopy(keys)))
    assert isinstance(found, DictConfig)
    return found


def _stored(record: RunRecord) -> tuple[Plan, ModelProfile]:
    """Plan and profile, of the pack or of the run's files. Raises `NotPredictable` where there is no profile."""
    if packed := record.metrics.get("profile"):
        return Plan.from_json(record.plan), ModelProfile.from_json(packed)
    folder = Path(record.manifest.get(ORIGIN, ""))
    if folder.is_dir():
        return Plan.load(folder / PLAN), ModelProfile.load(folder / PROFILE)
    raise NotPredictable("its pack is older than profiles in packs")
