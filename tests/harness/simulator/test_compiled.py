"""What large schedules go through has the results of the simulator that is there to be read, to the last bit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pickle import UnpicklingError
from typing import Any

import numba
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import simulator
from harness.core.cluster import SEND, CallTimes, Cluster, Device, EngineCosts, Link, TaskCost
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile, Skip
from harness.core.op import Op
from harness.core.plan import Mesh, Plan, Stage
from harness.core.problem import CannotRun
from harness.schedule import QueueOps, Schedule
from harness.schedule.builders.data_parallel import SHARDINGS, data_parallel, with_replicas
from harness.schedule.builders.deepspeed import deepspeed
from harness.schedule.builders.gpipe import RECOMPUTE, gpipe
from harness.schedule.builders.message_driven import message_driven
from harness.schedule.builders.myelin import ORDERS, myelin, split_into_chunks
from harness.schedule.builders.one_f_one_b import one_f_one_b
from harness.schedule.builders.periodic import unrolled
from harness.schedule.families import FAMILIES
from harness.schedule.policy import RULES, RuleName
from harness.schedule.tied_weight_ops import Tie, with_ties
from harness.schedule.transfers import Transfer, plan_transfers
from harness.simulator import Deadlock, Simulation, compiled, reference, simulate
from tests.support.patterns import Chain, pattern_of
from tests.tiers import examples

Case = tuple[Schedule, Plan, ModelProfile]
PICKING = [rule for rule in RULES if rule != "in_order"]
SECONDS = st.sampled_from([0.0, 0.25, 1.0, 1.5, 0.1, 1 / 3])
SIZES = st.sampled_from([0, 1, 3, 10])
TIE = Tie("embedding.weight", (0, 1), 40)


def layers(draw: Callable[..., Any], count: int) -> tuple[LayerProfile, ...]:
    return tuple(
        LayerProfile(
            f"l{j}", draw(SECONDS), draw(SECONDS), output_bytes=draw(SIZES), saved_bytes=draw(SIZES),
            param_bytes=draw(SIZES), working_bytes=draw(SIZES), input_share=draw(st.sampled_from([0.5, 0.3])),
        )
        for j in range(count)
    )  # fmt: skip


@st.composite
def cases(draw: Callable[..., Any]) -> Case:
    """A schedule of some builder, with its plan and its profile."""
    m, n, replicas = draw(st.integers(1, 8)), draw(st.integers(1, 4)), draw(st.sampled_from([1, 1, 2]))
    kinds = ["family", "gpipe", "message_driven", "myelin", "deepspeed", "1f1b", "data_parallel"]
    kind = draw(st.sampled_from(kinds))
    chunks = draw(st.integers(1, 3))
    family = FAMILIES[draw(st.sampled_from(sorted(FAMILIES)))]
    if kind == "family" and family.refuses(m, n) is not None:
        m = max(m // n, 1) * 2 * n
    placement = {"family": family.placement(n, chunks), "data_parallel": (0,)}.get(kind, tuple(range(n)))
    stages = len(placement)
    skips = (Skip(0, stages - 1, draw(SIZES), "long"),) if stages > 2 and draw(st.booleans()) else ()
    profile = ModelProfile(layers(draw, stages), skips=skips)
    plan = Plan(Mesh(data=replicas), tuple(Stage(j, j, device) for j, device in enumerate(placement)), m)
    sent = plan_transfers(plan, profile, portals=kind != "deepspeed" and draw(st.booleans()))
    schedule = build(draw, kind, m, placement, sent, replicas, lambda: family.build(m, n, chunks, sent))
    if kind in ("family", "gpipe", "1f1b", "message_driven"):
        schedule = with_replicas(schedule, plan, profile)
        if n > 1 and draw(st.booleans()):
            schedule = with_ties(schedule, [TIE], draw(st.sampled_from(["compute", "network"])))
        limit = draw(st.none() | st.none() | st.integers(2, 6)) if schedule.limit is None else schedule.limit
        schedule = replace(schedule, limit=limit, barrier=draw(st.booleans()))
        schedule = replace(schedule, loss=draw(st.sampled_from([schedule.loss] * 3 + ["gathered"])))
    return schedule, plan, profile


def build(
    draw: Callable[..., Any], kind: str, m: int, devices: Sequence[int], sent: list[Transfer], replicas: int,
    family: Callable[[], Schedule],
) -> Schedule:  # fmt: skip
    recompute, rule, n = draw(st.sampled_from(RECOMPUTE)), draw(st.sampled_from(PICKING)), len(devices)
    limit, switches = draw(st.none() | st.integers(1, 4)), draw(st.tuples(st.booleans(), st.booleans()))
    if kind == "gpipe":
        return gpipe(m, devices, sent, recompute, *switches)
    if kind == "1f1b":
        return one_f_one_b(m, devices, sent, recompute)
    if kind == "message_driven":
        return message_driven(m, devices, sent, rule, limit, recompute)
    if kind == "myelin":
        parts = [split_into_chunks(draw(st.integers(0, 9)), 2, 2, draw(st.integers(0, 2)), switches[0])] * n
        order, chunks = draw(st.sampled_from(ORDERS)), parts if draw(st.booleans()) else ()
        return myelin(m, devices, sent, order, rule, limit, (), replicas, chunks, switches[1], draw(st.booleans()))
    if kind == "deepspeed":
        ties, zero = [TIE] if n > 1 and switches[0] else [], draw(st.sampled_from([0, 1]))
        return deepspeed(m, devices, sent, recompute, ties, replicas, [8] * n, zero)
    if kind == "data_parallel":
        return data_parallel(m, 24, replicas, draw(st.sampled_from(SHARDINGS)), recompute, reshard=switches[0])
    return family()


COSTS = EngineCosts("e", "sgd", (TaskCost("F", 0.25), TaskCost("collective", 0.5)), host_s=0.125, step_s=0.5)
LINKS = st.builds(
    Link, st.sampled_from([0.0, 0.5]), st.sampled_from([0.0, 0.25, 0.1]), st.sampled_from(["half", "full"])
)
CLUSTERS = st.builds(
    Cluster, st.just("t"), st.just(32), st.sampled_from([1, 2, 4, 16]),
    st.sampled_from([Device(), Device(memory_bandwidth=7.0, kernel_s=0.1)]), LINKS, LINKS, LINKS, st.booleans(),
    cores=st.sampled_from([0.0, 0.0, 0.5, 1.0, 1.5, 3.0]),
    calls=st.sampled_from([(), (CallTimes(SEND, 2, (1, 8), (0.5, 1.5)),)]),
    slow=st.sampled_from([(), ((1, 2.0),), ((0, 1.5), (3, 3.0))]),
    task_s=st.sampled_from([0.0, 0.1]), alone_bandwidth=st.sampled_from([0.0, 15.0]),
    engines=st.sampled_from([(), (COSTS,)]),
)  # fmt: skip
MEMORIES = st.builds(
    MemoryModel, optimizer=st.just(2.0), offloaded=st.sampled_from([0.0, 2.0]), reducing=st.sampled_from([0.0, 0.5]),
    flat=st.booleans(), activations=st.sampled_from(["saved", "saved", "saved", "inputs"]),
    messages=st.sampled_from(["passing", "posted", "copied", "kept"]),
)  # fmt: skip


def found(simulated: Callable[..., Simulation], *arguments: Any) -> Any:
    """What a function returns or raises; `simulate` has compiled code for schedules of any size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulator, "LARGE_OPS", 0)
        patch.setattr(simulator, "START_OPS", 0)
        try:
            return simulated(*arguments)
        except (Deadlock, CannotRun, ValueError) as error:
            return type(error), str(error)


def compare(*arguments: Any) -> None:
    expected, fast = found(reference, *arguments), found(simulate, *arguments)
    if not isinstance(expected, Simulation):
        assert fast == expected
        return
    assert list(map(list, fast.nodes)) == list(map(list, expected.nodes))
    assert list(fast.start_s) == list(expected.start_s)
    assert list(fast.end_s) == list(expected.end_s)
    assert fast.figures == expected.figures
    assert fast.peaks == expected.peaks
    assert [list(peak.contents) for peak in fast.peaks] == [list(peak.contents) for peak in expected.peaks]
    assert fast.trace == expected.trace


@pytest.mark.fast
@settings(max_examples=examples(400))
@given(cases(), CLUSTERS, MEMORIES, st.sampled_from([0.0, 0.0, 0.1]))
def test_results_are_those_of_the_reference(case: Case, cluster: Cluster, memory: MemoryModel, jitter: float) -> None:
    compare(*case, cluster, memory, jitter, 7)


@pytest.mark.fast
@settings(max_examples=examples(100))
@given(st.data(), st.integers(3, 5), st.integers(4, 10), st.sampled_from(RECOMPUTE), st.sampled_from(PICKING))
def test_rules_pick_the_same_tasks(data: st.DataObject, n: int, m: int, recompute: str, rule: RuleName) -> None:
    profile, plan = ModelProfile(layers(data.draw, n)), Plan.contiguous([1] * n, m)
    schedule = message_driven(m, range(n), plan_transfers(plan, profile, portals=True), rule, None, recompute)
    blocking = data.draw(st.booleans())
    compare(
        schedule, plan, profile, Cluster("t", 1, n, intra=Link(0.5, 0.1), blocking_messages=blocking), MemoryModel()
    )


@pytest.mark.parametrize("name", [*FAMILIES, "gpipe with streams", "message_driven", "deepspeed", "replicas"])
def test_columns_know_the_schedules_of_pipelines(name: str) -> None:
    """So these do not fall back to a slower way, which has the same results."""
    n, m = 2, 4
    family = FAMILIES.get(name, FAMILIES["1f1b"])
    placement = family.placement(n, 2)
    profile = ModelProfile((LayerProfile("l", 1.0, 2.0, output_bytes=3, saved_bytes=5),) * len(placement))
    plan = Plan(Mesh(data=2), tuple(Stage(j, j, device) for j, device in enumerate(placement)), m)
    sent = plan_transfers(plan, profile, portals=True)
    schedule = {
        "gpipe with streams": lambda: gpipe(m, placement, sent),
        "message_driven": lambda: message_driven(m, placement, sent, "alternate", 2, "always"),
        "deepspeed": lambda: deepspeed(m, placement, sent, replicas=2, parameter_bytes=[8] * n),
        "replicas": lambda: with_replicas(one_f_one_b(m, placement, sent), plan, profile),
    }.get(name, lambda: family.build(m, n, 2, sent))()
    case = schedule, plan, profile, Cluster("t", 4, 2, node_port=Link(0.5, 0.1)), MemoryModel()
    assert compiled.simulated(*case, 0.0, 0) is not None
    compare(*case)


def test_weights_that_are_tied_to_those_of_a_device_that_picks() -> None:
    """Its op of the all-reduce has its own stage; the node has that of the first device."""
    n, m, tie = 4, 3, Tie("embedding.weight", (0, 1), 40)
    profile = ModelProfile((LayerProfile("l", 1.0, 2.0, output_bytes=3),) * n)
    plan = Plan(Mesh(data=2), tuple(Stage(j, j, j) for j in range(n)), m)
    tasks = message_driven(m, range(n), plan_transfers(plan, profile, portals=True), recompute="always")
    case = with_ties(with_replicas(tasks, plan, profile), [tie], "compute"), plan, profile, Cluster("t", 8, 1)
    assert compiled.simulated(*case, MemoryModel(), 0.0, 0) is not None
    compare(*case, MemoryModel())


def test_updates_in_chunks() -> None:
    n, m, chunks = 3, 3, split_into_chunks(9, 2, 2, 1)
    profile = ModelProfile((LayerProfile("l", 1.0, 2.0, output_bytes=3, param_bytes=18),) * n)
    plan = Plan(Mesh(data=2), tuple(Stage(j, j, j) for j in range(n)), m)
    sent = plan_transfers(plan, profile, portals=True)
    case = myelin(m, range(n), sent, replicas=2, chunks=[chunks] * n), plan, profile, Cluster("t", 6, 1, intra=Link(1))
    assert len(chunks) == 5
    assert compiled.simulated(*case, MemoryModel(), 0.0, 0) is not None
    compare(*case, MemoryModel())


def pattern_case(m: int, every: int | None = None, bytes_: tuple[int, int, int] = (0, 0, 0)) -> Case:
    """`bytes_` are those of a layer's parameters, its output and what it saves."""
    sizes = dict(zip(("param_bytes", "output_bytes", "saved_bytes"), bytes_, strict=True))
    chain = Chain((0, 1, 0), (1, 1, 3), (1, 2, 2), (0, 1, 4))
    layers = tuple(
        LayerProfile(forward_s=f, backward_s=b, **sizes) for f, b in zip(chain.forward, chain.backward, strict=True)
    )
    plan = Plan(Mesh(), tuple(Stage(j, j, device) for j, device in enumerate(chain.devices)), m)
    return unrolled(pattern_of(chain, [0] * 12), m, chain.devices, [], every), plan, ModelProfile(layers)


def test_messages_that_have_an_order_and_updates_of_each_micro_batch() -> None:
    schedule, plan, profile = pattern_case(20)
    cluster = Cluster(devices_per_node=2, intra=Link(0, 1, "half"))
    compare(schedule, plan, profile, cluster, MemoryModel())
    turned = replace(schedule, message_order=(tuple(reversed(schedule.message_order[0])),))
    compare(turned, plan, profile, cluster, MemoryModel())  # a deadlock


@pytest.mark.parametrize("every", [1, 2, 3, 7])
@pytest.mark.parametrize("bytes_", [(100, 1, 2), (10, 3, 200)])
def test_gradients_that_updates_free(every: int, bytes_: tuple[int, int, int]) -> None:
    memory = MemoryModel(optimizer=2.0, freed=True, updating=(1.0, 2.0))
    case = pattern_case(7, every, bytes_)
    cluster = Cluster(devices_per_node=2, device=Device(memory_bandwidth=70.0))
    compare(*case, cluster, memory)
    updates = [peak.contents.get("updating", 0) for peak in simulate(*case, cluster, memory).peaks]
    assert any(updates) == (bytes_[0] > bytes_[2])


def test_durations_that_are_given() -> None:
    schedule, plan, profile = pattern_case(5)
    durations = {str(op): 0.5 + place % 3 for place, op in enumerate(schedule.ops())}
    compare(schedule, plan, profile, Cluster(devices_per_node=2), MemoryModel(), 0.0, 0, durations)


def test_an_op_that_is_listed_twice() -> None:
    op = Op(0, "F", 0)
    plan, profile = Plan.contiguous([1]), ModelProfile((LayerProfile(),))
    schedule = Schedule((QueueOps(0, "compute", (op, op)),), (0,))
    assert "listed twice" in found(simulate, schedule, plan, profile, Cluster(), MemoryModel())[1]


def test_compiled_code_is_loaded_when_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """When schedules of 33 ops have 80 together; those of fewer than `LARGE_OPS` do not count."""
    case = *pattern_case(3), Cluster(devices_per_node=2), MemoryModel()
    asked = []
    monkeypatch.setattr(simulator, "_compiled", lambda: asked.append(True))
    monkeypatch.setattr(simulator, "_seen_ops", 0)
    monkeypatch.setattr(simulator, "START_OPS", 80)
    monkeypatch.setattr(simulator, "LARGE_OPS", 20)
    assert sum(len(queue.ops) for queue in case[0].queues) == 33
    for loaded in (0, 0, 1, 2):
        simulate(*case)
        assert len(asked) == loaded
    monkeypatch.setattr(simulator, "LARGE_OPS", 34)
    simulate(*case)
    assert len(asked) == 2


def test_without_numba_large_schedules_are_simulated_as_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "harness.simulator.compiled", None)
    monkeypatch.delattr(simulator, "compiled", raising=False)
    simulator._compiled.cache_clear()
    try:
        assert simulator._compiled() is None
        compare(*pattern_case(3), Cluster(devices_per_node=2), MemoryModel())
    finally:
        simulator._compiled.cache_clear()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), EOFError(), UnpicklingError("truncated")])
def test_where_numba_cannot_keep_its_code(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> None:
        raise error

    monkeypatch.setattr(compiled, "start", start)
    simulator._compiled.cache_clear()
    try:
        assert simulator._compiled() is None
    finally:
        simulator._compiled.cache_clear()


def test_where_numba_compiles_nothing_by_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    simulator._compiled.cache_clear()
    try:
        assert simulator._compiled() is None
    finally:
        simulator._compiled.cache_clear()


def test_a_queue_with_a_rule_and_without_ops() -> None:
    """In another order than it can: a deadlock; and with given durations."""
    ops = Op(0, "B", 0), Op(0, "F", 0)
    plan, profile = Plan.contiguous([1]), ModelProfile((LayerProfile(),))
    for row in (ops, ops[::-1]):
        schedule = Schedule((QueueOps(0, "compute", row), QueueOps(0, "host", (), "fifo")), (0,))
        compare(schedule, plan, profile, Cluster(), MemoryModel())
        compare(schedule, plan, profile, Cluster(), MemoryModel(), 0.0, 0, {"0F0": 1.0, "0B0": 2.0})
