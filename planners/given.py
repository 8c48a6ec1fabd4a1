"""Numbers of layers as the user gives them: torchgpipe's `balance`."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import OmegaConf

from harness.check import balance_key
from harness.cluster import Cluster
from harness.interfaces import PlanRequest
from harness.memory import MemoryModel
from harness.plan import Plan
from harness.problem import CannotRun, NoPlan, Problem
from harness.profile import ModelProfile
from planners import stages

EXAMPLE = "numbers of layers, as planner.balance=[3,2] for a model of 5 layers"
OmegaConf.register_new_resolver("stages_of", lambda balance: len(balance) or None, replace=True)


@dataclass
class Config:
    """The keys of `planner=given`."""

    name: str = "given"
    """The planner."""
    balance: list[int] = field(default_factory=list)
    """Number of consecutive layers of each stage: [34,76,70,61] is four stages, so mesh.pipeline is 4."""


class Given:
    """Stage j gets the `balance[j]` layers after those of stage j - 1."""

    def __init__(self, balance: list[int]) -> None:
        self.balance = balance

    def plan(self, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest) -> Plan:
        """Raises NoPlan where the layers are not those of the model, or the stages not those of the mesh."""
        layers, stated = len(profile.layers), sum(self.balance)
        stages_there = len(request.devices)
        if len(self.balance) != stages_there:
            what = f"has {len(self.balance)} stages, the engine has {stages_there} on mesh.pipeline {request.pipeline}"
            raise NoPlan(balance_key(self.balance), what, f"as many numbers as stages: {stages_there}")
        if stated != layers:
            what = f"places {stated} layers, the model has {layers}"
            raise NoPlan(balance_key(self.balance), what, f"numbers that add up to {layers}, or planner=balance")
        stages.check_request(profile, request)
        return stages.to_plan(self.balance, request, {})


def build(config: Config) -> Given:
    """The planner; raises CannotRun for a balance that fits no model."""
    if problem := _problem(config.balance):
        raise CannotRun([problem], "planner=given")
    return Given(list(config.balance))


def check(config: Config) -> None:
    """Raise ValueError with a line for a balance that fits no model."""
    if p := _problem(config.balance):
        raise ValueError(f"{p.key}   {p.what}   -> {p.mend}")


def _problem(balance: list[int]) -> Problem | None:
    if not balance:
        return Problem(balance_key(balance), "has 0 stages, needs at least 1", EXAMPLE)
    for stage, layers in enumerate(balance):
        if layers < 1:
            rest = [number for number in balance if number > 0]
            what = f"gives stage {stage} {layers} layers, needs at least 1"
            mend = balance_key(rest).replace(" ", "=") if rest else EXAMPLE
            return Problem(balance_key(balance), what, mend)
    return None
