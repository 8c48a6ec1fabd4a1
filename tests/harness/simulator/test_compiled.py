"""What large schedules go through has the results of the simulator that is there to be read, to the last bit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pickle import UnpicklingError
from typing import Any

import numba
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import simulator
from harness.core.cluster import Cluster, Device, Link
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.op import Op
from harness.core.plan import Mesh, Plan, Stage
from harness.core.problem import CannotRun
from harness.schedule import QueueOps, Schedule
from harness.schedule.builders.data_parallel import with_replicas
from harness.schedule.builders.deepspeed import deepspeed
from harness.schedule.builders.gpipe import RECOMPUTE, gpipe
from harness.schedule.builders.message_driven import message_driven
from harness.schedule.builders.myelin import myelin, split_into_chunks
from harness.schedule.builders.one_f_one_b import one_f_one_b
from harness.schedule.builders.periodic import unrolled
from harness.schedule.families import FAMILIES
from harness.schedule.policy import RuleName
from harness.schedule.tied_weight_ops import Tie, with_ties
from harness.schedule.transfers import plan_transfers
from harness.simulator import Deadlock, Simulation, compiled, reference, simulate
from tests.support.patterns import Chain, pattern_of
from tests.support.simulated_cases import CLUSTERS, MEMORIES, PICKING, Case, cases, layers
from tests.tiers import examples


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


def offloaded(m: int = 3, k: int = 2, replicas: int = 2) -> tuple[Any, ...]:
    """A pipeline of three whose optimizer state is copied in halves of buckets; chunks of the stages differ."""
    n = 3
    chunks = [split_into_chunks(elements, 2, 2, k, offload=True) for elements in (9, 12, 3)]
    profile = ModelProfile((LayerProfile("l", 1.0, 2.0, output_bytes=3, param_bytes=18),) * n)
    plan = Plan(Mesh(data=replicas), tuple(Stage(j, j, j) for j in range(n)), m)
    schedule = myelin(m, range(n), plan_transfers(plan, profile, portals=True), replicas=replicas, chunks=chunks)
    cluster = Cluster("t", 6, 1, Device(memory_bandwidth=7.0), Link(1), host_link=Link(0.25, 0.125))
    return schedule, plan, profile, cluster, MemoryModel(optimizer=0.0, offloaded=2.0)


@pytest.mark.parametrize("k", [0, 1, 2])
@pytest.mark.parametrize("replicas", [1, 2])
def test_optimizer_state_that_is_copied_in_chunks(k: int, replicas: int) -> None:
    case = offloaded(k=k, replicas=replicas)
    assert sum(op.kind == "copy" and op.peer is None for op in case[0].ops()) == 2 * (9 + 12 + 3)
    assert compiled.simulated(*case, 0.0, 0) is not None
    compare(*case)
    compare(*case, 0.1, 7)


@pytest.mark.parametrize("missing", ["/in", "/out", "bucket1a/in", "bucket1b/out", "bucket1a", "bucket", "chunk1"])
@pytest.mark.parametrize("kind", ["copy", "step", "collective"])
def test_parts_of_chunks_that_are_missing(missing: str, kind: str) -> None:
    """What nobody copies, updates or reduces keeps nothing waiting."""
    schedule, *others = offloaded()
    queues = (
        replace(
            queue, ops=tuple(op for op in queue.ops if op.kind != kind or op.peer is not None or missing not in op.part)
        )
        for queue in schedule.queues
    )
    case = replace(schedule, queues=tuple(queues)), *others
    assert compiled._columns(case[0], case[3]) is not None
    compare(*case)


def test_parts_of_chunks_that_columns_do_not_know() -> None:
    """One that is listed in two queues, one with a micro-batch, and copies that have no direction."""
    schedule, *others = offloaded()
    first = schedule.queues[0]
    half = Op(0, "step", None, "chunk0/bucket0a")
    for ops in (
        (*first.ops, Op(0, "step", 0, "chunk0/bucket0a")),
        (*first.ops, Op(0, "copy", None, "chunk0/bucket0a", bytes=3)),
    ):
        changed = replace(schedule, queues=(replace(first, ops=ops), *schedule.queues[1:]))
        assert compiled.simulated(changed, *others, 0.0, 0) is None
        compare(changed, *others)
    twice = replace(schedule, queues=(*schedule.queues, QueueOps(0, "host", (half,))))
    assert compiled.simulated(twice, *others, 0.0, 0) is None
    compare(twice, *others)
    again = replace(schedule, queues=(replace(first, ops=(*first.ops, half)), *schedule.queues[1:]))
    assert "listed twice" in found(simulate, again, *others)[1]


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
