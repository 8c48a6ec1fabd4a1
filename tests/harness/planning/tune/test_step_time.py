"""The analytic estimate against the simulator: seconds near by, memory from below; and steps of many micro-batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from harness.core.cluster import Cluster, Link
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Mesh, Plan
from harness.planning import draft
from harness.planning.draft import Layout, drafted
from harness.planning.tune import bounds, extrapolate
from harness.planning.tune.candidates import Candidate
from harness.planning.tune.step_time import Estimate, Known
from harness.schedule import Schedule
from tests.harness.planning.tune.nets import NODE, Bench, net

FREE = replace(
    NODE, intra=Link(), node_port=Link(), host_link=Link(), device=replace(NODE.device, memory_bandwidth=0.0)
)
"""Nothing but layers takes time."""
EVEN = [1e-3] * 8
ENGINES = [
    (["engine=myelin"], Mesh(2, 4)),
    (["engine=myelin", "engine.checkpoint_every=1", "engine.offload=true", "engine.bsize=100000"], Mesh(4, 2)),
    (["engine=myelin", "engine.order=1f1b", "engine.k=0"], Mesh(1, 8)),
    (["engine=gpipe", "engine.checkpoint=except_last"], Mesh(1, 8)),
    (["engine=gpipe", "engine.checkpoint=never"], Mesh(1, 4)),
    (["engine=deepspeed", "engine.zero=1", "engine.checkpoint=always"], Mesh(2, 4)),
    (["engine=deepspeed", "engine.zero=3"], Mesh(8, 1)),
    (["engine=ddp"], Mesh(8, 1)),
    (["engine=fsdp"], Mesh(8, 1)),
    (["engine=torch_pipelining", "engine.schedule=1f1b"], Mesh(1, 8)),
    (["engine=torch_pipelining", "engine.schedule=interleaved1f1b"], Mesh(1, 4)),
    (["engine=torch_pipelining", "engine.schedule=zbv"], Mesh(1, 4)),
    (["engine=single"], Mesh()),
]


@pytest.mark.parametrize(("typed", "mesh"), ENGINES[:1] + ENGINES[2:3] + ENGINES[4:5] + ENGINES[-1:])
def test_it_is_exact_where_only_layers_take_time(typed: list[str], mesh: Mesh) -> None:
    """(m + p - 1) slots."""
    bench, m = Bench(*typed, "planner=uniform", cluster=FREE), 12
    layout = bench.layout(Candidate(1, mesh, m * mesh.data), net(EVEN))
    seconds = Estimate(bench.engine, layout, Known()).seconds()
    slot = sum(layer.forward_s + layer.backward_s for layer in net(EVEN).layers) / mesh.pipeline
    assert seconds == pytest.approx((m + mesh.pipeline - 1) * slot)


@pytest.mark.parametrize("cores", [0, 1.5])
@pytest.mark.parametrize(("typed", "mesh"), ENGINES)
def test_it_is_near_the_simulation(typed: list[str], mesh: Mesh, cores: float) -> None:
    bench = Bench(*typed, cluster=replace(NODE, cores=cores))
    for one in (Candidate(1, mesh, 8 * mesh.data), Candidate(2, mesh, 64 * mesh.data)):
        profile = net([1e-3, 2e-3, 1e-3, 1e-3, 3e-3, 1e-3, 1e-3, 1e-3], one.micro_batch)
        layout, draft = bench.layout(one, profile), bench.draft(one, profile)
        estimate = Estimate(bench.engine, layout, Known())
        simulated = draft.plan.predicted
        assert estimate.seconds() == pytest.approx(simulated["step_time_s"], rel=0.2 if cores else 0.05)
        for closed, peak in zip(estimate.peaks, simulated["peak_memory_bytes"], strict=True):
            assert 0.6 * peak < closed <= peak


IN_HALVES = [(["engine=pipeline", f"engine.schedule={name}"], Mesh(1, 4)) for name in ("zb_h1", "zb_h2")]
"""The gradients of the weights are computed while those of the inputs are on their way back."""


@pytest.mark.parametrize(("typed", "mesh"), ENGINES + IN_HALVES)
@settings(max_examples=4)
@given(forward=st.lists(st.floats(1e-4, 1e-2), min_size=8, max_size=8), m=st.sampled_from([4, 8, 16, 24]))
def test_no_step_is_shorter_than_the_bound_of_its_plan(
    typed: list[str], mesh: Mesh, forward: list[float], m: int
) -> None:
    assume(m % 8 == 0 or "torch_pipelining" not in typed[0])  # which takes multiples of its stages
    bench, one = Bench(*typed), Candidate(1, mesh, m * mesh.data)
    draft = bench.draft(one, net(forward))
    least_s = Estimate(bench.engine, bench.layout(one, net(forward)), Known()).least_s()
    assert least_s <= draft.plan.predicted["step_time_s"] * (1 + 1e-9)


@pytest.mark.parametrize(("typed", "mesh"), [ENGINES[4], ENGINES[8], ENGINES[-1]])
def test_the_bound_is_the_step_where_nothing_waits(typed: list[str], mesh: Mesh) -> None:
    """Equal layers, no messages."""
    bench, one, profile = Bench(*typed, "planner=uniform", cluster=FREE), Candidate(1, mesh, 12 * mesh.data), net(EVEN)
    layout = bench.layout(one, profile)
    slot = sum(layer.forward_s + layer.backward_s for layer in profile.layers) / mesh.pipeline
    step = bench.draft(one, profile).plan.predicted["step_time_s"]
    assert step == pytest.approx((12 + mesh.pipeline - 1) * slot)
    assert Estimate(bench.engine, layout, Known()).least_s() == pytest.approx(step)


def test_the_bound_of_an_order_counts_what_it_recomputes() -> None:
    """Of two stages the first recomputes: the step of an order says how much, the plan only that some do."""
    plan = replace(Plan.contiguous([4, 4], 4, "always"), order=(("0F0",), ("1F0",)))
    layout = Layout(plan, net(EVEN), FREE, MemoryModel())
    one_s = sum(layer.forward_s + layer.backward_s for layer in net(EVEN).layers) / 2
    assert bounds.of_plan(layout, halves=False) == pytest.approx(5 * one_s)


def test_a_schedule_that_was_counted_is_not_made_again_for_its_memory() -> None:
    bench, known = Bench("engine=deepspeed", "engine.zero=1", "planner=uniform"), Known()
    made: list[int] = []
    schedule = bench.engine.schedule

    def counting(plan: Plan, profile: ModelProfile) -> Schedule:
        made.append(plan.micro_batches)
        return schedule(plan, profile)

    bench.engine.schedule = counting
    peaks = [
        Estimate(bench.engine, bench.layout(one, net(EVEN, one.micro_batch)), known).peaks
        for one in (Candidate(1, Mesh(2, 4), 8), Candidate(2, Mesh(2, 4), 16), Candidate(1, Mesh(1, 4), 4))
    ]
    assert len(made) == 1
    assert max(peaks[1]) > max(peaks[0]), "of larger micro-batches"
    Estimate(bench.engine, bench.layout(Candidate(1, Mesh(2, 2), 8), net(EVEN)), known)
    assert len(made) == 2, "another number of stages"


def test_schedules_that_differ_in_sizes_alone_are_validated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, known, validated = Bench("engine=myelin", "planner=uniform"), Known(), list[str]()
    monkeypatch.setattr(draft, "refuse_invalid", lambda engine, *_: validated.append(engine))

    def validate(one: Candidate) -> None:
        Estimate(bench.engine, bench.layout(one, net(EVEN, one.micro_batch)), known).validate("myelin")

    for one in (Candidate(1, Mesh(2, 2), 64), Candidate(2, Mesh(2, 2), 64)):
        validate(one)
    assert validated == ["myelin"]
    validate(Candidate(1, Mesh(2, 1), 64))
    validate(Candidate(1, Mesh(4, 2), 64))
    assert len(validated) == 3, "without sums over replicas, and of more stages"


FIXED = [(typed, mesh) for typed, mesh in ENGINES if "engine=myelin" not in typed or "engine.order=1f1b" in typed]


@pytest.mark.parametrize(("engine", "mesh"), FIXED)
@settings(max_examples=4)
@given(forward=st.lists(st.floats(1e-4, 1e-2), min_size=8, max_size=8), micro_batches=st.sampled_from([8, 16, 24]))
def test_memory_is_never_more_than_simulated(
    engine: list[str], mesh: Mesh, forward: list[float], micro_batches: int
) -> None:
    """Where the order is fixed: so nothing that fits is left out unseen."""
    bench, one = Bench(*engine), Candidate(1, mesh, micro_batches * mesh.data)
    peaks = Estimate(bench.engine, bench.layout(one, net(forward)), Known()).peaks
    simulated = bench.draft(one, net(forward)).plan.predicted["peak_memory_bytes"]
    assert all(closed <= peak for closed, peak in zip(peaks, simulated, strict=True))


def test_stages_share_a_port_at_the_end_of_a_step() -> None:
    """Four rings through each node's port: each begins when its stage is done, all end when all has been sent."""
    slow = Cluster("flat", 2, 4, NODE.device, Link(), Link(0.0, 1e-8), Link())
    bench = Bench("engine=myelin", "engine.order=1f1b", "planner=uniform", cluster=slow)
    one, profile = Candidate(1, Mesh(2, 4), 16), net(EVEN)
    seconds = Estimate(bench.engine, bench.layout(one, profile), Known()).seconds()
    assert seconds == pytest.approx(bench.draft(one, profile).plan.predicted["step_time_s"], rel=0.01)
    free = replace(slow, node_port=Link())
    alone = Estimate(bench.engine, Bench(*bench.typed, cluster=free).layout(one, profile), Known()).seconds()
    back_s = 3 * 2 * 2.1e-3  # the last stage's sum begins when three stages have their backward task still to do
    assert seconds - alone == pytest.approx(4 * 2 * 10**6 * 1e-8 - back_s, rel=0.05)


@pytest.mark.usefixtures("computation")
@pytest.mark.parametrize(("typed", "mesh"), ENGINES[:6] + ENGINES[9:12])
@pytest.mark.parametrize("forward", [EVEN, [5e-4, 2e-3, 1e-3, 1e-3, 3e-3, 1e-3, 1e-3, 2e-3]])
def test_a_step_of_many_micro_batches_is_that_of_few_extended(
    typed: list[str], mesh: Mesh, forward: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, one, profile = Bench(*typed), Candidate(1, mesh, 120 * mesh.data), net(forward)
    layout = bench.layout(one, profile)
    whole = drafted(bench.config, bench.engine, layout)
    monkeypatch.setattr(extrapolate, "WHOLE", 0)
    short = extrapolate.simulated(bench.config, bench.engine, layout)
    assert short.simulation.schedule.ops() != whole.schedule.ops(), "fewer were simulated"
    assert (short.plan.micro_batches, short.samples) == (120, one.batch)
    for name, found in whole.simulation.figures.items():
        extended = short.plan.predicted[name]
        if name != "bytes_sent":
            assert extended == pytest.approx(found, rel=0.01), name
        else:
            assert extended == found
