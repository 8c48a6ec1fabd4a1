"""Tasks take what the profile says; a backward pass in halves takes as long as a whole one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.core.cluster import Cluster, EngineCosts, TaskCost
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


COSTS = EngineCosts(
    "gpipe",
    "sgd",
    (
        TaskCost("F", 0.5, 0.25, 0.125, 2**-6, 8.0),
        TaskCost("B", 1.0, 0.5, 0.25, 2**-5),
        TaskCost("step", 2.0, 0.0, 1.0),
    ),
    host_s=4.0,
)
HELD = (
    replace(LAYERS[0], param_bytes=64, weights=2, norms=1),
    LAYERS[1],
    replace(LAYERS[2], param_bytes=32, weights=1),
)


def test_an_engine_takes_its_own_time() -> None:
    """Stage 0 holds one layer with two weights of 64 bytes and a batch norm, stage 1 one with one of 32. A
    recomputation is a forward pass; a half of a backward pass has half of what depends on the stage, and all of the
    rest."""
    cluster = Cluster(devices_per_node=2, engines=(COSTS,))
    found = TaskCosts(PLAN, ModelProfile(HELD), cluster, MemoryModel()).seconds
    forward = [4 + 0.5 + 0.25 + 0.25 + 1 + 8, 4 + 0.5 + 0.25 + 0.125 + 0.5]
    assert found["F"] == found["R"] == [2 + forward[0], 2 + forward[1]]
    assert found["B"] == [6 + 4 + 1 + 0.5 + 0.5 + 2, 6 + 4 + 1 + 0.5 + 0.25 + 1]
    assert found["I"] == [3 + 4 + 1 + 0.25 + 0.25 + 1, 1.5 + 4 + 1 + 0.25 + 0.125 + 0.5]
    assert found["step"] == [4 + 2 + 2, 4 + 2 + 1]


def test_measured_halves_take_their_own_time() -> None:
    """On stage 0 nobody needs gradients of the inputs: W is a whole backward pass, and what is left of I is what each
    task takes."""
    halves = (TaskCost("I", 0.5, 0.125), TaskCost("W", 0.0, 8.0, share=0.5))
    cluster = Cluster(devices_per_node=2, engines=(replace(COSTS, ops=(*COSTS.ops, *halves)),))
    profile = ModelProfile(HELD).without_input_gradients(PLAN.stages[0].last)
    found = TaskCosts(PLAN, profile, cluster, MemoryModel()).seconds
    assert found["I"] == [4 + 0.5, 1.5 + 4 + 0.5 + 0.125]
    assert found["W"] == [found["B"][0], 1.5 * 4.5 + 4 + 8]


def test_a_chunk_of_an_update_has_its_part() -> None:
    costs = TaskCosts(PLAN, ModelProfile(HELD), Cluster(devices_per_node=2, engines=(COSTS,)), MemoryModel())
    assert costs.chunk_s(0, 32) == 4 + 2 + 1
    assert costs.chunk_s(0, 64) == costs.seconds["step"][0]
    assert costs.chunk_s(1, 64) == costs.seconds["step"][1], "of another stage, which has fewer bytes"


def test_costs_are_those_of_the_engine_that_uses_the_cluster() -> None:
    cluster = Cluster(engines=(COSTS, replace(COSTS, engine="ddp", host_s=1.0), replace(COSTS, optimizer="adam")))
    assert cluster.engine_costs.host_s == 0  # nobody knows which one
    assert cluster.used_with("ddp", "sgd").engine_costs.host_s == 1
    assert cluster.used_with("gpipe", "adam").engines == (cluster.engines[2],)
    assert cluster.used_with("fsdp", "sgd").engines == ()


@pytest.mark.parametrize("wrong", [-1e-6, float("nan"), float("inf")])
def test_a_cost_is_a_time(wrong: float) -> None:
    with pytest.raises(ValueError, match=r"layer_s of F is .*, must be a finite number of at least 0"):
        TaskCost("F", 1.0, wrong)


def test_costs_that_were_asked_for_are_those_of_their_engine() -> None:
    assert (COSTS.of("F").base_s, COSTS.of("W").layer_s, COSTS.of("collective").base_s) == (0.5, 0.25, 0)
    other = replace(COSTS, ops=(TaskCost("F", 8.0),))
    assert (other.of("F").base_s, other.of("W").layer_s) == (8, 0)
    assert replace(other, ops=COSTS.ops) == COSTS, "what was asked for is no part of it"
