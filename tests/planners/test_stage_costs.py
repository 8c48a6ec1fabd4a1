from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core.cluster import Cluster, Link
from harness.core.memory_model import NAMED, MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile, Skip
from harness.core.plan import Plan
from harness.core.problem import NoPlan
from harness.interfaces import BatchShape, PlanRequest
from harness.schedule.builders.gpipe import gpipe
from harness.schedule.transfers import plan_transfers
from harness.simulator import simulate
from planners import stage_costs
from planners.pipeline import to_plan
from planners.stage_costs import StageCosts
from tests.planners.strategies import cuttings, profiles
from tests.problems import row

MODES = st.sampled_from(["never", "except_last", "always"])


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelProfile, PlanRequest, Plan]:
    """A model, a request, and a plan: any cut of that model."""
    profile = draw(profiles())
    stages = draw(st.integers(1, len(profile.layers)))
    request = PlanRequest(BatchShape(12, draw(st.integers(1, 4))), stages, recompute=draw(MODES))
    sizes = draw(st.sampled_from(list(cuttings(len(profile.layers), stages))))
    return profile, request, to_plan(sizes, request, {})


def flat(devices: int, link: Link) -> Cluster:
    return Cluster(devices_per_node=devices, intra=link)


@given(cases())
def test_bytes_sent_are_those_of_the_schedule_with_portals(case: tuple[ModelProfile, PlanRequest, Plan]) -> None:
    profile, request, plan = case
    table = stage_costs.sent_bytes(profile)
    sent = StageCosts(np.zeros(len(profile.layers)), (table,) * request.pipeline).for_sizes(plan.balance)
    assert sum(sent) == sum(transfer.bytes for transfer in plan_transfers(plan, profile, portals=True))


@given(cases(), st.sampled_from(["full", "half"]))
def test_time_is_the_longer_of_computing_and_receiving(
    case: tuple[ModelProfile, PlanRequest, Plan], duplex: str
) -> None:
    profile, request, plan = case
    link = Link(0.5, 2.0, duplex)  # type: ignore[arg-type]
    micro_batches = request.batch.micro_batches
    recomputed = {"never": 0, "always": micro_batches, "except_last": micro_batches - 1}[request.recompute]
    transfers = plan_transfers(plan, profile, portals=True)
    expected = []
    for number, stage in enumerate(plan.stages):
        forward = profile.sum("forward_s", stage.first, stage.last)
        computing = forward + profile.sum("backward_s", stage.first, stage.last) + forward * recomputed / micro_batches
        receiving = sum(link.seconds(transfer.bytes) for transfer in transfers if transfer.target == number)
        expected.append(max(computing, receiving * (2 if duplex == "half" else 1)))
    costs = stage_costs.by_time(profile, flat(request.pipeline, link), request)
    assert costs.for_sizes(plan.balance) == pytest.approx(expected)


@given(cases(), st.integers(1, 3))
def test_across_nodes_a_skip_is_charged_at_least_its_own_link(
    case: tuple[ModelProfile, PlanRequest, Plan], devices_per_node: int
) -> None:
    profile, request, plan = case
    cluster = Cluster(nodes=9, devices_per_node=devices_per_node, intra=Link(0, 1), node_port=Link(3, 5))
    arriving = [0.0] * request.pipeline
    for transfer in plan_transfers(plan, profile, portals=True):
        arriving[transfer.target] += cluster.link(transfer.source, transfer.target).seconds(transfer.bytes)
    costs = stage_costs.by_time(profile, cluster, request).for_sizes(plan.balance)
    assert all(cost >= least for cost, least in zip(costs, arriving, strict=True))


def test_a_boundary_across_nodes_is_charged_the_port() -> None:
    layers = tuple(LayerProfile(f"layer_{i}", 1.0, 2.0, output_bytes=10) for i in range(4))
    cluster = Cluster(nodes=2, devices_per_node=2, intra=Link(0, 1), node_port=Link(5, 2))
    costs = stage_costs.by_time(ModelProfile(layers), cluster, PlanRequest(BatchShape(4, 4), 4))
    assert costs.for_sizes([1, 1, 1, 1]) == [3, 10, 25, 10]


def test_a_skip_that_may_cross_nodes_is_charged_the_slowest_link() -> None:
    """Stages 0 1 | 2 3 on two nodes: the skip of 100 bytes into stage 3 is charged the port, the boundary is not."""
    layers = tuple(LayerProfile(f"layer_{i}", 1.0, 2.0, output_bytes=10) for i in range(4))
    cluster = Cluster(nodes=2, devices_per_node=2, intra=Link(0, 1), node_port=Link(5, 2))
    request = PlanRequest(BatchShape(4, 4), 4)
    for source in (0, 1):
        profile = ModelProfile(layers, skips=(Skip(source, 3, 100),))
        assert stage_costs.by_time(profile, cluster, request).for_sizes([1, 1, 1, 1]) == [3, 10, 25, 10 + 205]


@given(cases(), st.sampled_from(sorted(NAMED.values(), key=lambda model: model.name)))
def test_memory_follows_the_memory_model(case: tuple[ModelProfile, PlanRequest, Plan], memory: MemoryModel) -> None:
    profile, request, plan = case
    micro_batches = request.batch.micro_batches
    recomputed = {"never": 0, "always": micro_batches, "except_last": micro_batches - 1}[request.recompute]
    whole = micro_batches - recomputed or 1
    expected = []
    for stage in plan.stages:
        span = (profile, stage.first, stage.last)
        entered = memory.checkpoint_bytes(*span)
        activations = recomputed * entered + whole * memory.task_bytes(*span)
        if memory.activations == "saved":
            own_input = min(profile.boundary_bytes(stage.first), profile.layers[stage.first].saved_bytes)
            activations += (micro_batches - recomputed) * entered - whole * own_input
        expected.append(memory.state_bytes(*span) + activations)
    assert stage_costs.by_memory(profile, memory, request).for_sizes(plan.balance) == expected


@given(cases(), st.sampled_from(sorted(NAMED.values(), key=lambda model: model.name)))
def test_the_executed_schedule_needs_that_memory_at_least(
    case: tuple[ModelProfile, PlanRequest, Plan], memory: MemoryModel
) -> None:
    """The prediction adds what comes and goes: gradients, and the model's output."""
    profile, request, plan = case
    transfers = plan_transfers(plan, profile, portals=True)
    schedule = gpipe(request.batch.micro_batches, range(request.pipeline), transfers, request.recompute)
    figures = simulate(schedule, plan, profile, flat(request.pipeline, Link()), memory).figures
    costs = stage_costs.by_memory(profile, memory, request).for_sizes(plan.balance)
    assert all(cost <= peak for cost, peak in zip(costs, figures["peak_memory_bytes"], strict=True))


@given(cases())
def test_parameters_are_the_bytes_of_the_profile(case: tuple[ModelProfile, PlanRequest, Plan]) -> None:
    profile, request, plan = case
    expected = [profile.parameter_bytes(stage.first, stage.last) for stage in plan.stages]
    assert stage_costs.by_parameters(profile, request).for_sizes(plan.balance) == expected


@given(cases())
def test_the_layers_own_costs_add_up_where_nothing_enters(case: tuple[ModelProfile, PlanRequest, Plan]) -> None:
    profile, request, _ = case
    alone = ModelProfile(tuple(replace(layer, tied=()) for layer in profile.layers), input_bytes=0)
    one = PlanRequest(request.batch, 1, recompute=request.recompute)
    for costs in (
        stage_costs.by_time(alone, Cluster(), one),
        stage_costs.by_memory(alone, MemoryModel(), one),
        stage_costs.by_parameters(alone, one),
    ):
        assert costs.for_sizes([len(alone.layers)]) == pytest.approx([costs.layers.sum()])


def test_skips_stay_until_the_backward_pass() -> None:
    """Layers 0 1 2, a skip of 1000 bytes from 0 to 2; each saves 100 bytes, with its input of 7 or 10 among them."""
    layers = tuple(LayerProfile(f"layer_{i}", 1.0, 1.0, output_bytes=10, saved_bytes=100) for i in range(3))
    profile = ModelProfile(layers, input_bytes=7, skips=(Skip(0, 2, 1000),))
    for mode, expected in {
        "never": [4 * 100, 4 * 100, 4 * 1100],
        "except_last": [3 * 7 + 100, 3 * 10 + 100, 3 * 1010 + 1100],
        "always": [3 * 7 + 100, 3 * 10 + 100, 3 * 1010 + 1100],  # one more checkpoint has turned into all of its task
    }.items():
        request = PlanRequest(BatchShape(4, 4), 3, recompute=mode)
        assert stage_costs.by_memory(profile, MemoryModel(), request).for_sizes([1, 1, 1]) == expected


def test_a_profile_without_times_is_named() -> None:
    profile = ModelProfile((LayerProfile("a", param_bytes=4),), "tiny", source="counted by hand")
    with pytest.raises(NoPlan) as caught:
        stage_costs.by_time(profile, Cluster(), PlanRequest(BatchShape(1, 1), 1))
    assert row(caught.value.problem) == ("planner.by", "time", ["planner.by=parameters"])
    assert "tiny (counted by hand)" in caught.value.problem.message


def test_tables_are_those_of_their_own_profile() -> None:
    """They are kept for the profiles of a search: more than there are, each of which is gone before the next one is
    made."""
    for number in range(1, 2 * stage_costs.KEPT):
        layers = (LayerProfile("a", number, 0, param_bytes=number, output_bytes=number), LayerProfile("b", 1, 0))
        profile, request = ModelProfile(layers), PlanRequest(BatchShape(4, 2), 2)
        assert stage_costs.by_time(profile, flat(2, Link()), request).layers.tolist() == [number, 1]
        assert stage_costs.by_memory(profile, MemoryModel(gradients=0.0), request).layers.tolist() == [number, 0]
        assert stage_costs.sent_bytes(profile)[1, 1] == number


def test_tables_are_those_of_their_request() -> None:
    profile = ModelProfile((LayerProfile("a", 2, 0, param_bytes=3, output_bytes=5), LayerProfile("b", 1, 0)))
    request = PlanRequest(BatchShape(4, 2), 2, recompute="never")
    for _ in range(2):
        for mode, seconds in (("never", 2), ("always", 4), ("except_last", 3)):
            found = stage_costs.by_time(profile, flat(2, Link()), replace(request, recompute=mode))
            assert found.layers[0] == seconds
        for slowness in (1, 7):
            found = stage_costs.by_time(profile, flat(2, Link(0, slowness)), request)
            assert found.stages[1][1, 1] == max(1, 5 * slowness)
        for weights in (1.0, 2.0):
            found = stage_costs.by_memory(profile, MemoryModel(weights=weights, gradients=0.0), request)
            assert found.layers[0] == 3 * weights


def test_tables_that_are_kept_cannot_be_changed() -> None:
    profile, request = (
        ModelProfile((LayerProfile("a", 1, 1), LayerProfile("b", 1, 1))),
        PlanRequest(BatchShape(4, 2), 2),
    )
    for table in (stage_costs.sent_bytes(profile), stage_costs.by_time(profile, flat(2, Link()), request).stages[0]):
        with pytest.raises(ValueError, match="read-only"):
            table[0, 0] = 1
