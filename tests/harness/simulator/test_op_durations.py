"""Tasks take what the profile says; a backward pass in halves takes as long as a whole one."""

from __future__ import annotations

from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.plan import Mesh, Plan, Stage
from harness.simulator.op_durations import TaskCosts

LAYERS = (LayerProfile("a", 1, 2), LayerProfile("b", 1, 4), LayerProfile("c", 2, 6, input_share=0.25))
PLAN = Plan(Mesh(pipeline=2), (Stage(0, 1, 0), Stage(2, 2, 1)))


def seconds(profile: ModelProfile) -> dict[str, list[float]]:
    found = TaskCosts(PLAN, profile, Cluster(devices_per_node=2), MemoryModel()).seconds
    return {kind: found[kind] for kind in "FRBIW"}


def test_halves_are_the_whole() -> None:
    assert seconds(ModelProfile(LAYERS)) == {"F": [2, 2], "R": [2, 2], "B": [6, 6], "I": [3, 1.5], "W": [3, 4.5]}


def test_the_first_stage_has_no_gradients_of_inputs() -> None:
    profile = ModelProfile(LAYERS).without_input_gradients(PLAN.stages[0].last)
    assert seconds(profile) == {"F": [2, 2], "R": [2, 2], "B": [6, 6], "I": [0, 1.5], "W": [6, 4.5]}
