import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core.cluster import Cluster, Device, EngineCosts, Link, TaskCost
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile, Skip
from harness.core.op import Op
from harness.core.plan import Mesh, Plan, Stage
from harness.schedule import QueueOps, Schedule
from harness.schedule.builders.gpipe import gpipe
from harness.schedule.builders.myelin import myelin, split_into_chunks
from harness.schedule.transfers import plan_transfers
from harness.simulator import Deadlock, simulate
from tests.support.violations import violations

MEMORY = MemoryModel()
FREE = Link()


def chain(forward_s: list[float], backward_s: list[float], **sizes: int) -> ModelProfile:
    """One layer for each stage."""
    times = zip(forward_s, backward_s, strict=True)
    layers = tuple(LayerProfile(f"l{j}", forward_s=f, backward_s=b, **sizes) for j, (f, b) in enumerate(times))
    return ModelProfile(layers, input_bytes=sizes.get("output_bytes", 0))


def cluster(devices: int, link: Link = FREE, **device: float) -> Cluster:
    return Cluster("test", 1, devices, Device(**device), intra=link)


def pipeline(profile: ModelProfile, micro_batches: int, recompute: str = "never", **options: bool) -> tuple:
    plan = Plan.contiguous((1,) * len(profile.layers), micro_batches, recompute)
    portals = options.pop("portals", True)
    devices = [stage.device for stage in plan.stages]
    return plan, gpipe(micro_batches, devices, plan_transfers(plan, profile, portals), recompute, **options)


@given(m=st.integers(1, 9), n=st.integers(1, 6), forward=st.integers(1, 8), backward=st.integers(1, 16))
def test_equal_stages_without_communication_take_m_plus_n_minus_1_rounds(m, n, forward, backward):
    profile = chain([forward] * n, [backward] * n)
    plan, schedule = pipeline(profile, m)
    done = simulate(schedule, plan, profile, cluster(n), MEMORY)
    figures, trace = done.figures, done.trace
    assert figures["step_time_s"] == (m + n - 1) * (forward + backward)
    assert figures["utilization"] == pytest.approx([m / (m + n - 1)] * n)
    assert figures["bubble_fraction"] == pytest.approx((n - 1) / (m + n - 1))
    assert violations(schedule, trace) == []


def test_two_stages_look_like_the_drawing():
    profile = chain([1, 1], [2, 2])
    plan, schedule = pipeline(profile, 2)
    trace = simulate(schedule, plan, profile, cluster(2), MEMORY).trace
    compute = {span.op: span.start_s for span in trace.spans if span.queue == "compute"}
    assert compute == {
        "0F0": 0, "0F1": 1,                                           "0B1": 5,          "0B0": 7,           "0step": 9,
                  "1F0": 1, "1F1": 2, "1B1": 3,          "1B0": 5,           "1step": 7,
    }  # fmt: skip


def test_recomputation_adds_a_forward_for_each_recomputed_micro_batch_on_one_device():
    profile = chain([3], [4])
    for mode, recomputed in (("never", 0), ("except_last", 4), ("always", 5)):
        plan, schedule = pipeline(profile, 5, mode)
        assert simulate(schedule, plan, profile, cluster(1), MEMORY).figures["step_time_s"] == 5 * 7 + recomputed * 3


def test_two_micro_batches_of_which_one_is_recomputed_take_half_a_forward_pass_more():
    """Pipeline-1 of torchgpipe's Table 4: 3 / 3.5 of the speed of the plain model, 0.858 as published."""
    profile = chain([1], [2])
    seconds = {}
    for mode in ("never", "except_last"):
        plan, schedule = pipeline(profile, 2, mode)
        seconds[mode] = simulate(schedule, plan, profile, cluster(1), MEMORY).figures["step_time_s"]
    assert seconds["never"] / seconds["except_last"] == pytest.approx(3 / 3.5)


def test_a_copy_takes_latency_and_bytes_over_bandwidth():
    profile = chain([1, 1], [1, 1], output_bytes=100)
    plan, schedule = pipeline(profile, 1)
    figures = simulate(schedule, plan, profile, cluster(2, Link(0.5, 0.01)), MEMORY).figures
    assert figures["step_time_s"] == 4 + 2 * (0.5 + 1)


def test_copies_overlap_computation_only_with_streams():
    profile = chain([2, 2], [2, 2], output_bytes=100)
    link = Link(0, 0.01)  # a copy takes 1 s
    times, busy = {}, {}
    for streams in (True, False):
        plan, schedule = pipeline(profile, 4, streams=streams)
        done = simulate(schedule, plan, profile, cluster(2, link), MEMORY)
        figures, trace = done.figures, done.trace
        times[streams], busy[streams] = figures["step_time_s"], figures["utilization"]
        queues = {(span.device, span.queue) for span in trace.spans if "copy" in span.op}
        assert queues == {(0, "copy in"), (1, "copy in")} if streams else {(0, "compute"), (1, "compute")}
    # with: fill 2 + 1, then 4 tasks of 2; backward the same. without: each micro-batch's copy is in both queues
    assert times == {True: 2 * (2 + 1 + 4 * 2), False: 2 * (2 + 4 * (1 + 2))}
    assert busy[True] == pytest.approx([16 / 22] * 2)


def test_without_portals_a_skip_is_copied_through_every_stage():
    layers = tuple(LayerProfile(f"l{j}", forward_s=1, backward_s=1) for j in range(3))
    profile = ModelProfile(layers, skips=(Skip(0, 2, 200, "long"),))
    times = {}
    for portals, copies in ((True, 1), (False, 2)):
        plan, schedule = pipeline(profile, 1, portals=portals)
        done = simulate(schedule, plan, profile, cluster(3, Link(0, 0.01)), MEMORY)
        figures, trace = done.figures, done.trace
        assert sum(":long" in span.op for span in trace.spans) == 2 * copies
        times[portals] = figures["step_time_s"]
    assert times[False] == 6 + 2 * (2 + 2)  # each transfer of 2 s delays the next stage
    assert times[True] < times[False]  # at least in part after stage 1


def test_two_stages_on_one_device_share_its_lane():
    profile = chain([1, 1, 1], [2, 2, 2])
    plan = Plan(Plan.contiguous((1, 1, 1)).mesh, (Stage(0, 0, 0), Stage(1, 1, 1), Stage(2, 2, 0)), 1)
    schedule = gpipe(1, [0, 1, 0], plan_transfers(plan, profile, True), "never")
    figures = simulate(schedule, plan, profile, cluster(2), MEMORY).figures
    assert figures["step_time_s"] == 9
    assert figures["utilization"] == pytest.approx([6 / 9, 3 / 9])


def test_the_optimizer_costs_bytes_touched_over_memory_bandwidth():
    profile = chain([1], [1], param_bytes=100)
    plan, schedule = pipeline(profile, 1)
    slow = cluster(1, memory_bandwidth=100.0)
    assert simulate(schedule, plan, profile, slow, MEMORY).figures["step_time_s"] == 2 + 3  # g; w twice
    adam = MemoryModel("adam_fp32", optimizer=2.0)
    assert simulate(schedule, plan, profile, slow, adam).figures["step_time_s"] == 2 + 7
    assert simulate(schedule, plan, profile, cluster(1), adam).figures["step_time_s"] == 2


def test_each_task_costs_what_the_host_needs_for_it():
    """Three forward and three backward tasks on one device; the update is no task of the pipeline."""
    profile = chain([1], [2])
    plan, schedule = pipeline(profile, 3, "never")
    plain, costly = (
        simulate(schedule, plan, profile, replace(cluster(1), task_s=task_s), MEMORY).figures["step_time_s"]
        for task_s in (0.0, 0.25)
    )
    assert costly - plain == pytest.approx(6 * 0.25)


def test_what_passes_before_a_task_is_not_its_own():
    """A device is idle meanwhile. Before its first task there is what passes once in a step."""
    profile = chain([1], [2])
    plan, schedule = pipeline(profile, 1, "never")
    own = EngineCosts("gpipe", "sgd", (TaskCost("F", 0.25), TaskCost("B", 0.5)), host_s=0.125, step_s=1.0)
    step = simulate(schedule, plan, profile, replace(cluster(1), engines=(own,)), MEMORY)
    spans = {span.op: (span.start_s, span.end_s) for span in step.trace.spans}
    assert spans["0F0"] == (1.125, 2.375)
    assert spans["0B0"] == (2.5, 5.0)
    assert step.figures["utilization"] == pytest.approx([3.75 / step.figures["step_time_s"]])

    again = {str(span.op): span.end_s - span.start_s for span in step.trace.spans}
    replayed = simulate(schedule, plan, profile, replace(cluster(1), engines=(own,)), MEMORY, durations=again)
    assert replayed.trace.spans[0].start_s == 0  # a measured trace has it already


def test_a_core_is_free_before_a_task():
    """Two replicas share one core: their tasks take twice as long, what is before them does not."""
    profile = chain([1], [2])
    plan = Plan(Mesh(data=2), (Stage(0, 0, 0),), 1)
    schedule = replace(gpipe(1, [0], (), "never"), replicas=2)
    own = EngineCosts("ddp", "sgd", host_s=0.5)
    one = replace(cluster(2), engines=(own,), cores=1.0)
    spans = {span.op: (span.start_s, span.end_s) for span in simulate(schedule, plan, profile, one, MEMORY).trace.spans}
    assert spans["0F0"] == (0.5, 2.5)
    assert spans["0B0"] == (3.0, 7.0)


@pytest.mark.parametrize("cores", [0.0, 1.0])
def test_no_task_ends_before_it_begins(cores):
    """Whatever disturbs it: random factors, a slow device."""
    profile = chain([0.01, 0.01], [0.01, 0.01])
    plan, schedule = pipeline(profile, 4, "never")
    own = EngineCosts("gpipe", "sgd", (TaskCost("F", 0.01),), host_s=1.0, step_s=0.5)
    used = replace(cluster(2), engines=(own,), cores=cores, slow=((1, 3.0),))
    for seed in range(20):
        step = simulate(schedule, plan, profile, used, MEMORY, jitter=0.9, seed=seed)
        assert all(span.start_s <= span.end_s for span in step.trace.spans)
        assert min(step.figures["utilization"]) >= 0


def test_calls_of_collectives_take_the_engines_time():
    """One op may stand for several calls."""
    profile = chain([1], [1])
    plan = Plan(Mesh(data=2), (Stage(0, 0, 0),), 1)
    gather = Op(0, "collective", part="all_gather@data", bytes=8, buffers=(4, 4))
    plain = gpipe(1, [0], (), "never")
    queue = replace(plain.queues[0], ops=(gather, *plain.queues[0].ops))
    schedule = replace(plain, queues=(queue, *plain.queues[1:]), replicas=2)
    own = EngineCosts("fsdp", "sgd", (TaskCost("collective", 0.25),))
    times = [
        simulate(schedule, plan, profile, replace(cluster(2), engines=engines), MEMORY).figures["step_time_s"]
        for engines in ((), (own,))
    ]
    assert times[1] - times[0] == pytest.approx(2 * 0.25)


def test_each_update_launches_its_kernels():
    """A part of a stage costs as many as all of it: small buckets pay for it. Without parameters there is nothing."""
    profile = chain([1], [1], param_bytes=100)
    plan = Plan.contiguous((1,), 1)
    launching = cluster(1, memory_bandwidth=100.0, kernel_s=0.25)
    for size, buckets in ((100, 1), (50, 2), (10, 10)):
        schedule = myelin(1, [0], (), chunks=[split_into_chunks(100, 1, size, 1)])
        step_s = simulate(schedule, plan, profile, launching, MEMORY).figures["step_time_s"]
        assert step_s == pytest.approx(2 + 3 + buckets * 12 * 0.25)
    bare = chain([1], [1])
    assert simulate(gpipe(1, [0], (), "never"), plan, bare, launching, MEMORY).figures["step_time_s"] == 2


def test_the_peak_memory_comes_from_the_ledger():
    profile = chain([1], [2], saved_bytes=100, output_bytes=10, param_bytes=1000)
    plan, schedule = pipeline(profile, 4)
    paper = MemoryModel("inputs", activations="inputs")
    assert simulate(schedule, plan, profile, cluster(1), paper).figures["peak_memory_bytes"] == [2000 + 4 * 10]


def test_a_schedule_that_cannot_go_on_names_who_waits_for_what():
    queues = (
        QueueOps(0, "compute", (Op(0, "F", 0), Op(0, "B", 0))),
        QueueOps(1, "compute", (Op(1, "B", 0), Op(1, "F", 0))),
    )
    profile = chain([1, 1], [1, 1])
    with pytest.raises(Deadlock) as caught:
        simulate(Schedule(queues, (0, 1)), Plan.contiguous((1, 1)), profile, cluster(2), MEMORY)
    assert str(caught.value).splitlines()[1:] == [
        "  device 0 compute: 0B0 waits for 1B0",
        "  device 1 compute: 1B0 waits for 1F0",
    ]


def test_two_lanes_that_wait_for_each_other_are_a_deadlock():
    a, b = Op(1, "copy", 0, peer=0), Op(1, "copy", 1, peer=0)
    queues = (QueueOps(0, "compute", (a, b)), QueueOps(1, "compute", (b, a)))
    profile = chain([1, 1], [1, 1])
    with pytest.raises(Deadlock, match="1copy0<0 waits for its turn in device 1 compute, which is at 1copy1<0"):
        simulate(Schedule(queues, (0, 1)), Plan.contiguous((1, 1)), profile, cluster(2), MEMORY)


@given(
    st.integers(1, 4).flatmap(
        lambda n: st.tuples(
            st.lists(st.integers(0, 9), min_size=n, max_size=n), st.lists(st.integers(0, 9), min_size=n, max_size=n)
        )
    ),
    st.integers(1, 5),
    st.sampled_from(["always", "except_last", "never"]),
    st.booleans(),
    st.booleans(),
)
def test_the_time_is_the_longest_path(times, micro_batches, recompute, streams, dependency):
    """Against the longest path through the graph of dependencies and queue orders, by fixed-point iteration."""
    profile = chain(*times, output_bytes=1)
    plan, schedule = pipeline(profile, micro_batches, recompute, streams=streams, dependency=dependency)
    done = simulate(schedule, plan, profile, cluster(len(times[0]), Link(0, 1.0)), MEMORY)
    figures, trace = done.figures, done.trace
    cost = {"F": times[0], "R": times[0], "B": times[1], "copy": [1] * 9, "step": [0] * 9}
    before = schedule.dependencies()
    for queue in schedule.queues:
        for earlier, later in zip(queue.ops, queue.ops[1:], strict=False):
            before[later] = before[later] | {earlier}
    end = dict.fromkeys(before, 0.0)
    for _ in before:
        end = {op: max([end[e] for e in before[op]], default=0.0) + cost[op.kind][op.stage] for op in before}
    assert figures["step_time_s"] == max(end.values())
    assert violations(schedule, trace) == []
    assert all(math.isclose(span.end_s, end[Op.parse(span.op)]) for span in trace.spans)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"skips": (Skip(0, 1, 1, "s"), Skip(0, 1, 1, "s"))}, "two skips are called s, each needs a name of its own"),
        ({"micro_batch": 0}, "micro_batch is 0, must be at least 1"),
        ({"input_bytes": -1}, "input_bytes is -1, must be a number of at least 0"),
        ({"input_bytes": 10**30}, "input_bytes is 1000.*, must be a number of at least 0 and at most 1e.15"),
    ],
)
def test_a_profile_that_no_model_has_is_refused(change, text):
    layers = (LayerProfile("a"), LayerProfile("b"))
    with pytest.raises(ValueError, match=text):
        ModelProfile(layers, **change)
    with pytest.raises(ValueError, match="bytes of skip s from layer 0 to 1 is -5"):
        Skip(0, 1, -5, "s")
    with pytest.raises(ValueError, match=r"forward_s of layer 'a' is 1e.300"):
        LayerProfile("a", forward_s=1e300)


def test_skips_without_names_get_names_of_their_own():
    layers = tuple(LayerProfile(f"l{j}", 1, 1) for j in range(3))
    profile = ModelProfile(layers, skips=(Skip(0, 2, 5), Skip(0, 2, 7), Skip(1, 2, 9, "own")))
    assert [skip.name for skip in profile.skips] == ["skip_0_2", "skip_0_2_2", "own"]
    plan, schedule = pipeline(profile, 1)
    assert simulate(schedule, plan, profile, cluster(3), MEMORY).figures["bytes_sent"]["skips"] == 21
