"""The planner `given`: numbers of layers that the user specifies, torchgpipe's `balance`."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import OmegaConf

from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan
from harness.core.problem import NoPlan, Problem, refuse
from harness.interfaces import PlanRequest
from planners import pipeline

EXAMPLE = "numbers of layers, as planner.balance=[3,2] for a model of 5 layers"
OmegaConf.register_new_resolver("stages_of", lambda balance: len(balance) or None, replace=True)


@dataclass
class Config:
    """The keys of `planner=given`."""

    name: str = "given"
    """The planner."""
    balance: list[int] = field(default_factory=list)
    """Number of layers of each stage: [34,76,70,61] makes four stages, and mesh.pipeline=4."""


class Given:
    """Stage j gets the `balance[j]` layers after those of stage j - 1."""

    def __init__(self, balance: list[int]) -> None:
        self.balance = balance

    def plan(self, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest) -> Plan:
        """Returns a plan. Raises NoPlan where the layers are not those of the model, or the stages not those of the
        mesh."""
        layers, given_layers = len(profile.layers), sum(self.balance)
        stages = len(request.devices)
        if len(self.balance) != stages:
            needed = f"the engine has {stages} on mesh.pipeline {request.pipeline}"
            message, hint = f"has {len(self.balance)} stages, {needed}", f"as many numbers as stages: {stages}"
            raise NoPlan(Problem("planner.balance", self.balance, message, hint=hint))
        if given_layers != layers:
            message, hint = f"places {given_layers} layers, the model has {layers}", f"numbers that add up to {layers}"
            raise NoPlan(Problem("planner.balance", self.balance, message, ({"planner": "balance"},), hint))
        pipeline.check_request(profile, request)
        return pipeline.to_plan(self.balance, request, {})


def build(config: Config) -> Given:
    """Returns the planner; raises CannotRun for a balance that fits no model."""
    refuse(check(config), "planner=given")
    return Given(list(config.balance))


def check(config: Config) -> list[Problem]:
    """Checks the values of the keys."""
    balance = list(config.balance)
    empty = next((stage for stage, layers in enumerate(balance) if layers < 1), None)
    if balance and empty is None:
        return []
    rest = [layers for layers in balance if layers > 0]
    message = "has 0 stages" if empty is None else f"gives stage {empty} {balance[empty]} layers"
    fixes = ({"planner.balance": rest},) if rest else ()
    return [Problem("planner.balance", balance, f"{message}, needs at least 1", fixes, "" if rest else EXAMPLE)]
