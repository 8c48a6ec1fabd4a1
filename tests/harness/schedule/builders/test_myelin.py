"""Myelin's schedule: the order of tasks, and the end of a step in chunks, each against its closed form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core.cluster import Cluster, Device, Link
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.op import Op
from harness.core.plan import Plan
from harness.core.problem import ProblemError
from harness.schedule import Schedule
from harness.schedule.builders.myelin import ORDERS, Chunk, myelin, split_into_chunks
from harness.schedule.dependency_graph import COPIES
from harness.schedule.policy import RULES
from harness.schedule.tied_weight_ops import Tie
from harness.schedule.transfers import Transfer
from harness.schedule.validate import validation_errors
from harness.simulator import Simulation, simulate
from tests.problems import Row, refused, rows
from tests.support.violations import violations

PICKING = [rule for rule in RULES if rule != "in_order"]
UPDATED = MemoryModel(weights=0.5, gradients=0.0)
"""An update touches each byte of the parameters once."""


def chain(stages: int) -> list[Transfer]:
    return [Transfer(j, j + 1, bytes=10) for j in range(stages - 1)]


def run(
    schedule: Schedule, m: int, cluster: Cluster | None = None, memory: MemoryModel = UPDATED, saved: int = 0,
    work_s: Sequence[float] = (),
) -> Simulation:  # fmt: skip
    """A layer on each stage: forward tasks take 1 s (or `work_s`), backward tasks twice as long."""
    n = len(schedule.devices)
    work_s = work_s or [1.0] * n
    layers = tuple(LayerProfile(forward_s=f, backward_s=2 * f, output_bytes=10, saved_bytes=saved) for f in work_s)
    cluster = cluster or Cluster(devices_per_node=n * schedule.replicas)
    done = simulate(schedule, Plan.contiguous([1] * n, m), ModelProfile(layers), cluster, memory)
    assert violations(schedule, done.trace) == []
    return done


def times(done: Simulation) -> dict[str, tuple[float, float]]:
    return {span.op: (span.start_s, span.end_s) for span in done.trace.spans}


def ran(done: Simulation, device: int, queue: str = "compute") -> str:
    return " ".join(span.op for span in done.trace.queues()[device, queue])


def most_in_flight(done: Simulation, stage: int) -> int:
    """Micro-batches between the start of their forward task on a stage and the end of their backward task there."""
    alive = most = 0
    for name in ran(done, stage).split():
        alive += {"F": 1, "B": -1}.get(Op.parse(name).kind, 0)
        most = max(most, alive)
    return most


MIXES = st.fixed_dictionaries(
    {
        "order": st.sampled_from(ORDERS),
        "rule": st.sampled_from(PICKING),
        "limit": st.none() | st.integers(1, 6),
        "replicas": st.integers(1, 2),
        "overlap": st.booleans(),
    }
)


@settings(deadline=None)
@given(
    m=st.integers(1, 6), n=st.integers(1, 4), mix=MIXES, tied=st.booleans(), elements=st.integers(0, 9),
    bsize=st.integers(1, 4), k=st.integers(0, 3), offload=st.booleans(), skip=st.booleans(),
    work_s=st.lists(st.sampled_from([0.5, 1.0, 2.25]), min_size=4, max_size=4),
)  # fmt: skip
def test_every_schedule_runs_and_keeps_the_limit(
    m: int, n: int, mix: dict[str, Any], tied: bool, elements: int, bsize: int, k: int, offload: bool, skip: bool,
    work_s: list[float],
) -> None:  # fmt: skip
    transfers = chain(n) + ([Transfer(0, n - 1, "up", 5)] if skip and n > 2 else [])
    ties = [Tie("w", (0, n - 1), 4, COPIES)] if tied and n > 1 else []
    chunks = [split_into_chunks(elements, 4, bsize, k, offload)] * n
    schedule = myelin(m, range(n), transfers, ties=ties, chunks=chunks, **mix)
    assert validation_errors(schedule, Plan.contiguous([1] * n, m)) == []
    assert Schedule.from_json(schedule.to_json()) == schedule
    link = Link(0.25, 1 / 40)
    cluster = Cluster(devices_per_node=2 * n, device=Device(memory_bandwidth=8.0), intra=link, host_link=link)
    done = run(schedule, m, cluster, replace(UPDATED, offloaded=3.0), work_s=work_s[:n])
    limit = m if mix["order"] != "message_driven" else mix["limit"] or n
    for stage in range(n):
        assert most_in_flight(done, stage) <= limit


@pytest.mark.parametrize("rule", PICKING)
@given(m=st.integers(1, 9), n=st.integers(1, 4))
def test_equal_tasks_take_as_long_as_with_1f1b(rule: str, m: int, n: int) -> None:
    driven = myelin(m, range(n), chain(n), rule=rule)  # type: ignore[arg-type]
    for schedule in (driven, myelin(m, range(n), chain(n), "1f1b"), myelin(m, range(n), chain(n), "gpipe")):
        assert run(schedule, m).figures["step_time_s"] == (m + n - 1) * 3


@pytest.mark.parametrize(("rule", "lost"), [("fifo", 9), ("forward_first", 4), ("backward_first", 0), ("alternate", 0)])
def test_on_many_stages_it_loses_a_little_once(rule: str, lost: float) -> None:
    """Not what a schedule that knows the future would do; but however many micro-batches there are."""

    def lost_s(m: int) -> float:
        schedule = myelin(m, range(7), chain(7), rule=rule)  # type: ignore[arg-type]
        return float(run(schedule, m).figures["step_time_s"]) - (m + 6) * 3

    assert lost_s(7) == 0
    assert lost_s(19) == lost_s(50) == lost


def test_the_picture() -> None:
    done = run(myelin(4, range(3), chain(3)), 4)
    assert [ran(done, device) for device in range(3)] == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3 0step:chunk0",
        "1F0 1F1 1F2 1B0 1B1 1F3 1B2 1B3 1step:chunk0",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2step:chunk0",
    ]
    assert times(done)["1F3"] == (10, 11)


def test_one_micro_batch_at_a_time() -> None:
    """Each goes all the way there and back: 3 stages of 3 s, and 4 messages of 1 s."""
    cluster = Cluster(devices_per_node=3, intra=Link(0, 1 / 10))
    assert run(myelin(2, range(3), chain(3), limit=1), 2, cluster).figures["step_time_s"] == 2 * (3 * 3 + 4)


def test_memory_under_limits() -> None:
    """The first stage keeps what so many micro-batches have saved; 1F1B's later stages keep fewer, GPipe's all."""

    def saved(order: str = "message_driven", limit: int | None = None) -> list[int]:
        done = run(myelin(8, range(3), chain(3), order, limit=limit), 8, saved=1000)  # type: ignore[arg-type]
        return [round(peak.contents["saved"] / 1000) for peak in done.peaks]

    assert saved(limit=1) == [1, 1, 1]
    assert saved(limit=2) == [2, 2, 1]
    assert saved() == saved(limit=3) == [3, 3, 1]
    assert saved("1f1b") == [3, 2, 1]
    assert saved("gpipe") == [8, 8, 8]


def test_the_policy_counts_where_stages_are_unequal() -> None:
    """A slow stage in the middle, all micro-batches let in: it decides when the first one is back.

    Stage 1 runs F0 from 1 to 3, F1 to 5, F2 to 7; stage 2's gradient of micro-batch 0 arrives at 6.
    """
    back_s = {}
    for rule in ("forward_first", "backward_first"):
        schedule = myelin(4, range(3), chain(3), rule=rule, limit=4)
        back_s[rule] = times(run(schedule, 4, work_s=[1.0, 2.0, 1.0]))["1B0"][0]
    assert back_s == {"forward_first": 9, "backward_first": 7}


@pytest.mark.parametrize("elements", [0, 1, 4, 5, 8, 9, 13])
@pytest.mark.parametrize("k", [0, 1, 2])
def test_chunks(elements: int, k: int) -> None:
    chunks = split_into_chunks(elements, 2, 4, k, offload=True)
    buckets = -(-elements // 4)
    assert len(chunks) == (-(-buckets // k) if k else min(1, buckets))
    assert sum(chunk.bytes for chunk in chunks) == 2 * elements
    assert [sum(map(sum, chunk.buckets)) for chunk in chunks] == [chunk.bytes for chunk in chunks]
    every = [bucket for chunk in chunks for bucket in chunk.buckets]
    assert all(bucket == (4, 4) for bucket in every[:-1])
    assert all(0 <= bucket[0] - sum(bucket[1:]) <= 2 for bucket in every), "a half may have a parameter more"
    assert [replace(chunk, buckets=()) for chunk in chunks] == list(split_into_chunks(elements, 2, 4, k))


@pytest.mark.parametrize(("tied", "sums"), [(0, [8, 8, 4]), (3, [8, 6, 0]), (2, [8, 8, 0]), (10, [0, 0, 0])])
def test_chunks_leave_out_what_is_summed_over_copies(tied: int, sums: list[int]) -> None:
    """Ten parameters of 2 bytes in chunks of four; one of which nothing is left to sum is only updated."""
    chunks = split_into_chunks(10, 2, 4, 1, tied=tied)
    schedule = myelin(1, [0], [], replicas=2, chunks=[chunks])
    ops = [op for one in schedule.queues for op in one.ops]
    bytes_of = {op.part: op.bytes for op in ops if op.kind == "collective"}
    assert [bytes_of.get(f"all_reduce@data/chunk{c}", 0) for c in range(3)] == sums
    assert len(bytes_of) == sum(size > 0 for size in sums)
    assert [op.bytes for op in ops if op.kind == "step"] == [8, 8, 4]
    assert validation_errors(schedule, Plan.contiguous([1], 1)) == []


def test_the_names_at_the_end_of_a_step() -> None:
    text = myelin(1, [0], [], replicas=2, chunks=[split_into_chunks(9, 4, 4, 2, offload=True)]).text()
    assert [line.split("  ")[-1].strip() for line in text.splitlines()] == [
        "0F0 0B0 0step:chunk0/bucket0a 0step:chunk0/bucket0b 0step:chunk0/bucket1a 0step:chunk0/bucket1b "
        "0step:chunk1/bucket2a",
        "0copy:chunk0/bucket0a/in 0copy:chunk0/bucket0b/in 0copy:chunk0/bucket1a/in 0copy:chunk0/bucket1b/in "
        "0copy:chunk1/bucket2a/in",
        "0copy:chunk0/bucket0a/out 0copy:chunk0/bucket0b/out 0copy:chunk0/bucket1a/out 0copy:chunk0/bucket1b/out "
        "0copy:chunk1/bucket2a/out",
        "0collective:all_reduce@data/chunk0 0collective:all_reduce@data/chunk1",
    ]


SUM_S, STEP_S = 2.0, 1.5
"""Of 40 bytes: 2 x 1/2 x 40 over a link of 20 bytes/s, and 40 once through a memory of 80 / 3 bytes/s."""
TWO = Cluster(devices_per_node=2, device=Device(memory_bandwidth=80 / 3), intra=Link(0, 1 / 20))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_sums_and_updates_are_a_pipeline_of_two(count: int) -> None:
    """C chunks: one sum after the other on the network, each followed by its update.

    network  |sum 0|sum 1|sum 2|
    compute        |step 0||step 1||step 2|
    """
    chunks = [(Chunk(40),) * count]
    done = run(myelin(1, [0], [], replicas=2, chunks=chunks), 1, TWO)
    assert done.figures["step_time_s"] == pytest.approx(3 + count * SUM_S + STEP_S)
    spans = times(done)
    sums = [spans[f"0collective:all_reduce@data/chunk{c}"] for c in range(count)]
    assert sums[0][0] == 3
    assert all(following[0] == one[1] for one, following in pairwise(sums))
    assert all(spans[f"0step:chunk{c}"][0] == pytest.approx(sums[c][1]) for c in range(count))


def test_slow_updates_are_what_counts() -> None:
    slow = replace(TWO, device=Device(memory_bandwidth=10.0))  # 4 s an update
    done = run(myelin(1, [0], [], replicas=2, chunks=[(Chunk(40),) * 3]), 1, slow)
    assert done.figures["step_time_s"] == pytest.approx(3 + SUM_S + 3 * 4)


def test_with_a_barrier_sums_begin_when_all_stages_have_ended() -> None:
    cluster = replace(TWO, devices_per_node=4)
    begins = {}
    for barrier in (False, True):
        schedule = myelin(2, range(2), chain(2), replicas=2, chunks=[(Chunk(40),)] * 2, barrier=barrier)
        assert validation_errors(schedule, Plan.contiguous([1] * 2, 2)) == []
        assert Schedule.from_json(schedule.to_json()) == schedule
        spans = times(run(schedule, 2, cluster))
        begins[barrier] = [spans[f"{stage}collective:all_reduce@data/chunk0"][0] for stage in range(2)]
        ends = [spans[f"{stage}B1"][1] for stage in range(2)]
        assert begins[barrier] == ([max(ends)] * 2 if barrier else ends)
    assert begins[False][1] < begins[True][1]


def test_without_overlap_they_follow_each_other() -> None:
    schedule = myelin(1, [0], [], replicas=2, chunks=[split_into_chunks(40, 1, 10, 0)], overlap=False)
    assert run(schedule, 1, TWO).figures["step_time_s"] == pytest.approx(3 + SUM_S + STEP_S)
    assert schedule.text().split()[3:] == ["0F0", "0B0", "0collective:all_reduce@data/chunk0", "0step:chunk0"]


def test_without_replicas_there_is_nothing_to_sum() -> None:
    done = run(myelin(1, [0], [], chunks=[(Chunk(40),) * 3]), 1, TWO)
    assert done.figures["step_time_s"] == pytest.approx(3 + 3 * STEP_S)
    assert ran(done, 0) == "0F0 0B0 0step:chunk0 0step:chunk1 0step:chunk2"


def test_smaller_chunks_hide_more_and_calls_cost() -> None:
    """The time of k buckets a chunk: all sums, a latency for each, and the update of the last chunk (section V-C)."""

    def end_s(k: int, alpha_s: float) -> float:
        cluster = replace(TWO, intra=Link(alpha_s, 1 / 20))
        chunks = [split_into_chunks(160, 1, 20, k)]
        schedule = myelin(1, [0], [], replicas=2, chunks=chunks, overlap=k > 0)
        return float(run(schedule, 1, cluster).figures["step_time_s"]) - 3

    for k, calls in ((0, 1), (1, 8), (2, 4), (4, 2), (8, 1)):
        for alpha_s in (0.0, 0.5):
            last_s = 20 * (k or 8) * STEP_S / 40
            assert end_s(k, alpha_s) == pytest.approx(160 / 20 + calls * 2 * alpha_s + last_s)


def test_sums_over_copies_come_first() -> None:
    ties = [Tie("w", (0, 1), 20, COPIES)]
    chunks = [split_into_chunks(40, 1, 20, 1)] * 2
    cluster = replace(TWO, devices_per_node=4)
    spans = times(run(myelin(1, range(2), chain(2), ties=ties, replicas=2, chunks=chunks), 1, cluster))
    tied = spans["0collective:all_reduce@copies/w"]
    assert tied == spans["1collective:all_reduce@copies/w"]
    assert tied[1] - tied[0] == pytest.approx(2 * 3 / 4 * 20 / 20), "a ring of both stages in both replicas"
    for stage in range(2):
        assert spans[f"{stage}collective:all_reduce@data/chunk0"][0] == tied[1] >= spans["0B0"][1]


def test_a_step_waits_for_its_own_chunk_only() -> None:
    schedule = myelin(2, [0], [], replicas=2, chunks=[(Chunk(40),) * 2])
    before = {str(op): set(map(str, earlier)) for op, earlier in schedule.dependencies().items()}
    assert before["0step:chunk1"] == {"0collective:all_reduce@data/chunk1"}
    assert before["0collective:all_reduce@data/chunk1"] == {"0B0", "0B1"}
    alone = myelin(2, [0], [], chunks=[(Chunk(40),) * 2]).dependencies()
    assert set(map(str, alone[Op(0, "step", None, "chunk1")])) == {"0B0", "0B1"}


@pytest.mark.parametrize(
    ("host_s", "step_s", "expected"), [(1.0, 3.0, 1 + 6 * 3 + 1), (3.0, 1.0, None), (1.0, 0.0, None)]
)
def test_buckets_come_and_go_next_to_the_updates(host_s: float, step_s: float, expected: float | None) -> None:
    """Three buckets in halves. Updates that take long hide all copies but the first and the last one.

    copy in   |0a|0b|      |1a|  |1b|
    compute      | 0a  | 0b  | 1a  |
    copy out           |0a|  |0b|

    Where copies take longer, a place is filled, updated and emptied in turn: 1a waits for 0a, and 1b for 0b.
    """
    memory = replace(UPDATED, offloaded=3.0)
    bandwidth = (1 + 2 * 3) * 10 / step_s if step_s else 0.0
    cluster = Cluster(device=Device(memory_bandwidth=bandwidth), host_link=Link(0, host_s / 30))
    schedule = myelin(1, [0], [], chunks=[split_into_chunks(60, 1, 20, 2, offload=True)])
    done = run(schedule, 1, cluster, memory)
    spans = times(done)
    parts = [f"chunk{bucket // 2}/bucket{bucket}{half}" for bucket in range(3) for half in "ab"]
    for number, part in enumerate(parts):
        arrives, updates, leaves = (spans[f"0{op}"] for op in (f"copy:{part}/in", f"step:{part}", f"copy:{part}/out"))
        assert arrives[1] - arrives[0] == leaves[1] - leaves[0] == pytest.approx(host_s)
        assert spans["0B0"][1] <= arrives[0] < arrives[1] <= updates[0] <= updates[1] <= leaves[0]
        if number >= 2:
            assert arrives[0] >= spans[f"0copy:{parts[number - 2]}/out"][1]
    if expected:
        assert done.figures["step_time_s"] == pytest.approx(3 + expected)


def test_a_bucket_of_one_parameter_visits_one_place() -> None:
    before = myelin(1, [0], [], chunks=[split_into_chunks(3, 1, 1, 0, offload=True)]).dependencies()
    second = Op(0, "copy", None, "chunk0/bucket1a/in")
    assert set(map(str, before[second])) == {"0copy:chunk0/bucket0a/out"}


def test_a_step_of_chunks_takes_as_long_as_a_whole_one() -> None:
    """What the memory model has for each byte of the parameters goes through the device's memory, wherever it is
    stored."""
    cluster = Cluster(device=Device(memory_bandwidth=100.0))
    for memory in (MemoryModel(optimizer=2.0), MemoryModel(offloaded=2.0)):
        done = run(myelin(1, [0], [], chunks=[split_into_chunks(70, 1, 30, 1)]), 1, cluster, memory)
        assert done.figures["step_time_s"] == pytest.approx(3 + 70 * (2 + 1 + 4) / 100)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"order": "2f2b"}, ("order", "2f2b", ["order=message_driven"])),
        ({"rule": "lifo"}, ("rule", "lifo", ["rule=fifo"])),
        ({"limit": 0}, ("limit", 0, ["limit=3"])),
        ({"devices": [0, 1, 0]}, ("stages 0 and 2", None, [])),
    ],
)
def test_what_it_refuses(options: dict[str, object], found: Row) -> None:
    keys = {"devices": range(3), "transfers": chain(3), **options}
    with pytest.raises(ProblemError) as caught:
        myelin(2, **keys)  # type: ignore[arg-type]
    assert rows(refused(caught)) == [found]


@pytest.mark.parametrize(
    ("lost", "key", "message"),
    [
        ("0step:chunk0/bucket0a", "0copy:chunk0/bucket0a/in of stage 0", "has no 0step:chunk0/bucket0a"),
        ("0copy:chunk0/bucket0b/out", "0copy:chunk0/bucket0b/in of stage 0", "has no 0copy:chunk0/bucket0b/out"),
        ("0copy:chunk0/bucket0a/in", "0copy:chunk0/bucket0a/out of stage 0", "has no 0copy:chunk0/bucket0a/in"),
    ],
)
def test_buckets_that_nobody_updates_are_a_fault(lost: str, key: str, message: str) -> None:
    schedule = myelin(1, [0], [], chunks=[split_into_chunks(10, 1, 10, 1, offload=True)])
    queues = (replace(queue, ops=tuple(op for op in queue.ops if str(op) != lost)) for queue in schedule.queues)
    first, *_ = validation_errors(replace(schedule, queues=tuple(queues)))
    assert (first.key, first.message) == (key, message)
