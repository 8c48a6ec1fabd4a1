"""What a pattern is checked against knows nothing of its planner."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.cli.compose import compose
from harness.config import registry
from harness.core import memory_model
from harness.core.cluster import Cluster, Device, Link
from harness.core.model_profile import LayerProfile, ModelProfile, Skip, Tied
from harness.core.plan import Mesh, Plan, Stage
from harness.interfaces import BatchShape, Planner, PlanRequest
from harness.simulator.pattern_requirements import pattern_requirements, plan_pattern_errors
from tests.support.patterns import FAR, FAR_S

GB = 10**9
PAPER = memory_model.named("madpipe_paper")
SAVED = memory_model.named("sgd_momentum_fp32")
NET = ModelProfile.load(registry.ROOT / "sweeps" / "profiles" / "resnet50_1000.json")
CLUSTER = Cluster(devices_per_node=4, device=Device(memory_bytes=4 * GB), intra=Link(0.0, 1 / 12e9, "half"))
TWO = ModelProfile(
    (LayerProfile("a", 1.0, 2.0, param_bytes=8, output_bytes=100, saved_bytes=30),
     LayerProfile("b", 1.0, 2.0, param_bytes=8, buffer_bytes=1, output_bytes=10, saved_bytes=50)),
    input_bytes=7,
)  # fmt: skip
SLOW = Cluster(devices_per_node=2, device=Device(memory_bytes=1000), intra=Link(0.0, 1 / 100))
"""100 bytes in a second."""
PLAN = Plan(Mesh(pipeline=2), (Stage(0, 0, 0), Stage(1, 1, 1)), 4, pattern=FAR)


def planned(name: str, model: memory_model.MemoryModel, gb: int = 4) -> tuple[Plan, Cluster]:
    planner: Planner = registry.build("planner", compose([f"planner={name}"]).planner)
    cluster = replace(CLUSTER, device=Device(memory_bytes=gb * GB))
    return planner.plan(NET, cluster, model, PlanRequest(BatchShape(64, 8), pipeline=4)), cluster


def test_seconds_and_bytes_follow_from_profile_links_and_memory_model() -> None:
    asked = pattern_requirements(PLAN, TWO, SLOW, PAPER)
    assert asked.seconds == FAR_S
    assert asked.stored == [7, 100], "inputs of layers"
    assert asked.fixed == {0: 24 + 200, 1: 24 + 1 + 200}, "three times the weights, two buffers"
    assert asked.limit == 1000
    saved = pattern_requirements(PLAN, TWO, SLOW, replace(SAVED, reserve_bytes=9))
    assert saved.stored == [30, 50] and saved.limit == 991
    assert saved.fixed == {0: 24 + 200 + 4 * 7 + 108, 1: 24 + 1 + 200 + 10 + 118}, "inputs, output, working set"


def test_a_skip_crosses_each_cut_that_it_jumps_over_and_tied_layers_of_a_device_count_once() -> None:
    tied = (Tied("w", 8),)
    layers = tuple(replace(layer, tied=tied) for layer in (*TWO.layers, TWO.layers[0]))
    profile = replace(TWO, layers=layers, skips=(Skip(0, 2, 50, "up"),))
    plan = replace(PLAN, stages=(Stage(0, 0, 0), Stage(1, 1, 1), Stage(2, 2, 0)))
    asked = pattern_requirements(plan, profile, SLOW, PAPER)
    assert (asked.seconds["1copy0<0"], asked.seconds["1copy0<2"]) == (1.5, 0.6)
    assert asked.fixed == {0: 24 + 300 + 120, 1: 24 + 1 + 300 + 120}
    together = replace(plan, stages=(Stage(0, 1, 0), Stage(2, 2, 0)))
    assert set(pattern_requirements(together, profile, SLOW, PAPER).seconds) == {"0F0", "0B0", "1F0", "1B0"}


@pytest.mark.parametrize(("planner", "gb"), [("madpipe", 4), ("contiguous", 4), ("pipedream", 8)])
@pytest.mark.parametrize("model", [PAPER, SAVED], ids=["inputs", "saved"])
def test_plans_of_all_planners_pass(planner: str, gb: int, model: memory_model.MemoryModel) -> None:
    gb = gb if model is PAPER else 12
    plan, cluster = planned(planner, model, gb)
    assert plan_pattern_errors(plan, NET, cluster, model) == []
    asked = pattern_requirements(plan, NET, cluster, model)
    assert asked.seconds == pytest.approx(plan.predicted["tasks_s"], rel=1e-9)


def changed(**factors: int) -> ModelProfile:
    """The network as it is, for a planner that takes these for smaller."""
    more = [{key: getattr(layer, key) * factor for key, factor in factors.items()} for layer in NET.layers]
    return replace(NET, layers=tuple(replace(one, **m) for one, m in zip(NET.layers, more, strict=True)))


def test_what_a_planner_has_counted_wrong_is_found() -> None:
    plan, cluster = planned("madpipe", PAPER)
    assert any(
        "the period is" in one.message for one in plan_pattern_errors(plan, changed(forward_s=4), cluster, PAPER)
    )
    for wrong in (changed(param_bytes=9), changed(output_bytes=2)):
        assert any(
            "its limit is 4,000,000,000" in one.message for one in plan_pattern_errors(plan, wrong, cluster, PAPER)
        )
    assert plan.pattern is not None
    ops = tuple(p for p in plan.pattern.ops if str(p.op) != "2copy0<1")
    (fault,) = plan_pattern_errors(replace(plan, pattern=replace(plan.pattern, ops=ops)), NET, cluster, PAPER)
    assert fault.key == "2copy0<1 of stage 2" and "is not in the pattern" in fault.message


def test_a_plan_without_a_pattern_has_no_faults() -> None:
    assert plan_pattern_errors(replace(PLAN, pattern=None), TWO, SLOW, PAPER) == []
