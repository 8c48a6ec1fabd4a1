"""The plug-in: what it predicts, what it refuses, and that the simulator agrees."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from harness.core.cluster import Cluster, Device, Duplex, Link
from harness.core.memory_model import named
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.plan import Plan
from harness.core.problem import NoPlan, Problem
from harness.interfaces import BatchShape, PlanRequest, Refused
from harness.schedule.builders.periodic import unrolled
from harness.schedule.pattern_validity import pattern_errors
from harness.schedule.transfers import plan_transfers
from harness.simulator import simulate
from planners import contiguous, pipedream
from planners.madpipe import period_search
from planners.madpipe.planner import Config, build, check
from planners.periodic.layer_ticks import chain_from_profile
from planners.periodic.min_period import fixed_point
from tests.problems import fixes, row, rows
from tests.support.quick import within_s

ROOT = Path(__file__).parents[3]
MB = 10**6
MEMORY = named("madpipe_paper")
REQUEST = PlanRequest(BatchShape(32, 32), pipeline=3)


def network(*seconds: float) -> ModelProfile:
    """Activations shrink and weights grow from layer to layer, as in a network of convolutions."""
    layers = tuple(
        LayerProfile(f"layer{i}", one, 2 * one, param_bytes=(1 + i * i) * MB, output_bytes=(120 - 12 * i) * MB)
        for i, one in enumerate(seconds)
    )
    return ModelProfile(layers, "network", 1, input_bytes=100 * MB)


NETWORK = network(0.02, 0.03, 0.02, 0.04, 0.02, 0.03, 0.02, 0.03)


def cluster(memory_mb: int) -> Cluster:
    return Cluster(devices_per_node=3, device=Device(memory_bytes=memory_mb * MB), intra=Link(0.0, 1 / 12e9, "half"))


def planned(memory_mb: int = 1500, **keys: object) -> Plan:
    return build(Config(**keys)).plan(NETWORK, cluster(memory_mb), MEMORY, REQUEST)  # type: ignore[arg-type]


@pytest.mark.parametrize("memory_mb", [1300, 1500, 2000, 4000])
def test_a_plan_is_valid_and_says_what_it_needs(memory_mb: int) -> None:
    plan = planned(memory_mb)
    predicted = plan.predicted
    assert plan.pattern is not None and plan.mesh.pipeline == 3
    errors = pattern_errors(
        plan.pattern, predicted["tasks_s"], predicted["stored_bytes"], predicted["fixed_bytes"], memory_mb * MB, "half"
    )
    assert errors == []
    assert max(predicted["pattern_memory_bytes"]) <= predicted["memory_limit_bytes"] == memory_mb * MB
    assert predicted["least_of_any_s"] <= predicted["period_s"] <= predicted["whole_s"] <= predicted["contiguous_s"]
    assert predicted["least_of_any_s"] <= predicted["least_s"] <= predicted["whole_s"]
    assert predicted["one_device_s"] == pytest.approx(0.63) and predicted["finished"]


def test_more_memory_is_never_slower() -> None:
    periods = [planned(memory_mb).predicted["period_s"] for memory_mb in (1300, 1500, 2000, 4000)]
    assert periods == sorted(periods, reverse=True)


@pytest.mark.parametrize(("duplex", "period_s"), [("half", 0.27), ("full", 0.24)])
def test_the_simulator_has_the_period_of_the_plan(duplex: Duplex, period_s: float) -> None:
    """Links are the cluster's, and so slow that it matters whether messages may pass each other."""
    some = replace(cluster(1500), intra=Link(0.0, 1 / 0.8e9, duplex))
    plan = build(Config(duplex="cluster")).plan(NETWORK, some, MEMORY, REQUEST)
    assert plan.pattern is not None
    assert plan.pattern.period_s == pytest.approx(period_s)
    devices = [stage.device for stage in plan.stages]
    schedule = unrolled(plan.pattern, 32, devices, plan_transfers(plan, NETWORK, portals=False))
    done = simulate(schedule, plan, NETWORK, some, MEMORY)
    ends = sorted(span.end_s for span in done.trace.spans if span.op.startswith("0B"))
    assert (ends[24] - ends[8]) / 16 == pytest.approx(plan.pattern.period_s, rel=1e-6)


def test_too_small_a_memory_names_one_that_works() -> None:
    with pytest.raises(NoPlan) as caught:
        planned(300)
    assert (caught.value.problem.key, caught.value.problem.value) == ("cluster.memory_gb", None)
    (fix,) = caught.value.problem.fixes
    assert planned(round(1000 * fix["cluster.memory_gb"])).pattern is not None


def turns(memory_mb: int, **keys: object) -> Plan:
    """In order one of two devices has 6 GB and a message's buffers; with stages in turns, 5 GB each are enough."""
    sizes = (4, 3, 1, 2)
    layers = tuple(LayerProfile(str(n), 0.1, 0.2, param_bytes=gb * 10**9 // 3) for n, gb in enumerate(sizes))
    some = Cluster(devices_per_node=2, device=Device(memory_bytes=memory_mb * MB), intra=Link(0.0, 1 / 12e9))
    request = replace(REQUEST, pipeline=2)
    return build(Config(**keys)).plan(ModelProfile(layers), some, MEMORY, request)  # type: ignore[arg-type]


def test_where_only_stages_in_turns_fit_there_is_a_plan() -> None:
    plan = turns(5000)
    assert [stage.device for stage in plan.stages] == [0, 1, 0, 1]
    assert plan.predicted["least_s"] is None and plan.predicted["contiguous_s"] is None
    assert plan.predicted["first_phase_s"] <= plan.predicted["period_s"]
    with pytest.raises(NoPlan) as caught:
        turns(4999)
    assert row(caught.value.problem) == ("cluster.memory_gb", None, ["cluster.memory_gb=5"])


def test_the_published_search_sends_to_the_exact_one() -> None:
    with pytest.raises(NoPlan) as caught:
        turns(4999, allocation="published")
    assert fixes(caught.value.problem) == ["cluster.memory_gb=5 planner.allocation=exact"]
    with pytest.raises(NoPlan) as caught:
        turns(5000, allocation="published")
    assert row(caught.value.problem) == ("planner.allocation", "published", ["planner.allocation=exact"])


@pytest.mark.parametrize("devices", [3, 8])
def test_a_network_of_the_paper_is_planned_in_a_moment(devices: int) -> None:
    """The first phase in 0.2 s, whole stages in 2 s, all of it in little more than its limit; `make bench` has the
    rest."""
    profile = ModelProfile.load(ROOT / "sweeps" / "profiles" / "densenet121_1000.json")
    device = Device(memory_bytes=5 * 10**9)
    some = Cluster(devices_per_node=devices, device=device, intra=Link(0.0, 1 / 12e9, "half"))
    own = chain_from_profile(profile, some, MEMORY)
    assert within_s(0.2, lambda: fixed_point(own, devices)) is not None
    request = replace(REQUEST, pipeline=devices)
    whole = within_s(2, lambda: build(Config(atomic=True)).plan(profile, some, MEMORY, request))
    plan = within_s(6, lambda: build(Config(limit_s=3.0)).plan(profile, some, MEMORY, request))
    assert plan.predicted["period_s"] <= whole.predicted["period_s"] <= whole.predicted["contiguous_s"]


def test_more_devices_than_layers_are_refused() -> None:
    many = replace(REQUEST, pipeline=9)
    with pytest.raises(NoPlan, match="needs at least 9 layers"):
        build(Config()).plan(NETWORK, cluster(1500), MEMORY, many)


def test_a_profile_without_times_is_refused() -> None:
    with pytest.raises(NoPlan, match="needs layer times"):
        build(Config()).plan(network(0.0, 0.0, 0.0), cluster(1500), MEMORY, REQUEST)


def test_wrong_keys_are_named_all_at_once() -> None:
    assert rows(check(Config(allocation="grid", duplex="both", iterations=0, limit_s=0))) == [
        ("planner.duplex", "both", ["planner.duplex=cluster"]),
        ("planner.allocation", "grid", ["planner.allocation=exact"]),
        ("planner.iterations", 0, ["planner.iterations=10"]),
        ("planner.limit_s", 0, ["planner.limit_s=8"]),
    ]


def test_links_in_one_direction_at_a_time_refuse_messages_that_pass_each_other() -> None:
    with pytest.raises(NoPlan, match="both directions at once"):
        planned(duplex="full")


def test_links_that_are_not_equal_give_no_bound_of_whole_stages() -> None:
    nodes = Cluster(
        nodes=2, devices_per_node=2, device=Device(memory_bytes=1500 * MB), intra=Link(0.0, 1e-12),
        node_port=Link(0.0, 1 / 12e9),
    )  # fmt: skip
    predicted = build(Config()).plan(NETWORK, nodes, MEMORY, replace(REQUEST, pipeline=4)).predicted
    assert predicted["least_s"] is None and predicted["least_of_any_s"] <= predicted["period_s"]


@pytest.mark.full
def test_layers_of_long_chains_run_apart_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 layers, of which 8 take next to no time, on three devices: at most 3 blocks on each. The search ends by its
    proof, in four seconds, and not by its limit, however slow the machine is."""
    monkeypatch.setattr(period_search, "SMALL_DEVICE", 3)
    small = LayerProfile("small", 1e-5, 1e-5, output_bytes=1000)
    layers = [replace(small, name=f"{one.name}.{part}") if part else one for one in NETWORK.layers for part in range(2)]
    long, some = replace(NETWORK, layers=tuple(layers)), cluster(1500)
    apart, whole = (
        build(Config(atomic=atomic, limit_s=600)).plan(long, some, MEMORY, REQUEST) for atomic in (False, True)
    )
    assert apart.predicted["finished"] and whole.predicted["finished"]
    assert apart.predicted["period_s"] < 0.95 * whole.predicted["period_s"]
    counts = Counter(stage.device for stage in apart.stages)
    assert sum(stage.layers for stage in apart.stages) == 16 and max(counts.values()) <= 3
    assert any(one.device == two.device for one, two in pairwise(apart.stages))


def test_layers_apart_are_not_taken_where_few_micro_batches_take_longer() -> None:
    """Two micro-batches fill and drain for as long as they run."""
    few = replace(REQUEST, batch=BatchShape(2, 2))
    found, whole = (build(Config(atomic=atomic)).plan(NETWORK, cluster(1500), MEMORY, few) for atomic in (False, True))
    assert found.stages == whole.stages and found.predicted["period_s"] == whole.predicted["period_s"]


def test_of_the_plans_that_are_found_the_best_one_that_the_engine_runs_is_taken() -> None:
    """Layers apart, whole stages of which a device has several, one stage on each device."""
    asked: list[Plan] = []

    def refused(most: int) -> Refused:
        def of(plan: Plan) -> list[Problem]:
            asked.append(plan)
            return [Problem("engine", "x", "cannot")] * (max(Counter(s.device for s in plan.stages).values()) > most)

        return of

    def period_s(most: int) -> float:
        request = replace(REQUEST, refused=refused(most))
        return build(Config()).plan(NETWORK, cluster(1500), MEMORY, request).predicted["period_s"]

    any_s, one_s, none_s = period_s(99), period_s(1), period_s(0)
    predicted = planned().predicted
    assert predicted["period_s"] == any_s < predicted["whole_s"] <= predicted["contiguous_s"] == one_s == none_s
    assert len(asked) == 1 + 2 + 2, "whole stages are consecutive here"


def test_the_published_search_is_refused_where_it_takes_minutes() -> None:
    with pytest.raises(NoPlan, match="more than 80 layers, the model has 81") as refused:
        build(Config(allocation="published")).plan(
            replace(NETWORK, layers=NETWORK.layers[:1] * 81), cluster(10**6), MEMORY, REQUEST
        )
    assert refused.value.problem.fixes == ({"planner.allocation": "exact"},)


def test_links_that_are_slower_than_ticks_can_report() -> None:
    slow = replace(cluster(1500), intra=Link(0.0, 1e6))
    with pytest.raises(NoPlan, match="times as long as all layers"):
        build(Config()).plan(network(1e-9, 1e-9, 1e-9), slow, MEMORY, REQUEST)


@pytest.mark.parametrize("name", ["madpipe", "contiguous", "pipedream"])
def test_what_fits_by_the_planner_fits_in_the_simulator(name: str) -> None:
    """With all that autograd saves; and where there is a plan, there is one with more memory."""
    saving = replace(NETWORK, layers=tuple(replace(one, saved_bytes=2 * one.output_bytes) for one in NETWORK.layers))
    adam, found = named("adam_fp32"), []
    others = {"contiguous": contiguous.build(contiguous.Config()), "pipedream": pipedream.build(pipedream.Config())}
    planner = others.get(name) or build(Config())
    for memory_mb in range(2000, 8001, 750):
        some = cluster(memory_mb)
        try:
            plan = planner.plan(saving, some, adam, replace(REQUEST, batch=BatchShape(8, 8)))
        except NoPlan:
            assert not found, "there was one with less"
            continue
        assert plan.pattern is not None
        devices = [stage.device for stage in plan.stages]
        schedule = unrolled(plan.pattern, 8, devices, plan_transfers(plan, saving, portals=False))
        done = simulate(schedule, plan, saving, some, adam)
        assert max(done.figures["peak_memory_bytes"]) <= memory_mb * MB
        found.append(plan.predicted["period_s"])
    assert len(found) > 3
