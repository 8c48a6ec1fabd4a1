from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core.model_profile import LayerProfile, ModelProfile, Skip
from harness.core.op import Op
from harness.core.plan import Plan
from harness.core.trace import DeviceQueue, Span, Trace
from harness.schedule import QueueOps, Schedule
from harness.schedule.builders.gpipe import clock_cycles, gpipe, recomputed
from harness.schedule.transfers import StageSkip, Transfer, plan_transfers, transfers
from tests.support.violations import violations


def executed(schedule: Schedule) -> Trace:
    """Every op takes one second, starts as soon as its queues let it, and occupies all queues that it stands in."""
    waits, todo = schedule.dependencies(), {queue: list(ops) for queue, ops in schedule.by_queue().items()}
    end: dict[Op, float] = {}
    free: dict[DeviceQueue, float] = dict.fromkeys(todo, 0.0)
    spans: list[Span] = []
    while any(todo.values()):
        heads = {ops[0] for ops in todo.values() if ops}
        ready = [
            op for op in heads if all(ops[0] == op for ops in todo.values() if op in ops) and waits[op] <= set(end)
        ]
        assert ready, f"nothing can continue: {sorted(map(str, heads))}"
        for op in ready:
            homes = [queue for queue, ops in todo.items() if op in ops]
            start = max([free[queue] for queue in homes] + [end[before] for before in waits[op]])
            end[op] = start + 1
            for queue in homes:
                todo[queue].pop(0)
                free[queue] = end[op]
                spans.append(Span(str(op), *queue, start, end[op]))
    return Trace(tuple(spans))


def chain(stages: int) -> list[Transfer]:
    return [Transfer(j, j + 1, bytes=100 + j) for j in range(stages - 1)]


def test_clock_cycles_look_like_the_picture() -> None:
    """
    m=4 n=3   cycle   0      1      2      3      4      5
    stage 0          (0,0)  (1,0)  (2,0)  (3,0)
    stage 1                 (0,1)  (1,1)  (2,1)  (3,1)
    stage 2                        (0,2)  (1,2)  (2,2)  (3,2)
    """
    assert list(clock_cycles(4, 3)) == [
        [(0, 0)],
        [(1, 0), (0, 1)],
        [(2, 0), (1, 1), (0, 2)],
        [(3, 0), (2, 1), (1, 2)],
        [(3, 1), (2, 2)],
        [(3, 2)],
    ]


@given(st.integers(1, 9), st.integers(1, 9))
def test_every_task_is_in_the_cycle_of_its_sum(m: int, n: int) -> None:
    cycles = list(clock_cycles(m, n))
    expected = {k: {(i, k - i) for i in range(m) if 0 <= k - i < n} for k in range(m + n - 1)}
    assert {k: set(cycle) for k, cycle in enumerate(cycles)} == expected
    assert sum(map(len, cycles)) == m * n


@pytest.mark.parametrize(("mode", "expected"), [("never", []), ("except_last", [0, 1, 2]), ("always", [0, 1, 2, 3])])
def test_recomputed_micro_batches(mode: str, expected: list[int]) -> None:
    assert [i for i in range(4) if recomputed(i, 4, mode)] == expected


@pytest.mark.parametrize(("mode", "count"), [("never", 0), ("except_last", 5 * (8 - 1)), ("always", 5 * 8)])
def test_number_of_recomputations(mode: str, count: int) -> None:
    """n(m-1) with except_last, for n=5 stages and m=8 micro-batches."""
    assert sum(op.kind == "R" for op in gpipe(8, range(5), chain(5), mode).ops()) == count


def test_gpipe_on_two_devices() -> None:
    """Copies come before the tasks that need them; each recomputation right before its backward pass."""
    assert gpipe(3, [0, 1], chain(2)).text() == (
        "device 0 compute  0F0 0F1 0F2 0B2 0R1 0B1 0R0 0B0 0step\n"
        "device 0 copy in  0copy2<1 0copy1<1 0copy0<1\n"
        "device 1 compute  1F0 1F1 1F2 1B2 1R1 1B1 1R0 1B0 1step\n"
        "device 1 copy in  1copy0<0 1copy1<0 1copy2<0"
    )


def test_without_the_dependency_recomputations_run_first_all_at_once() -> None:
    assert gpipe(3, [0], [], "always", dependency=False).text() == (
        "device 0 compute  0F0 0F1 0F2 0R2 0R1 0R0 0B2 0B1 0B0 0step"
    )


def test_without_streams_a_copy_occupies_both_compute_queues() -> None:
    schedule = gpipe(2, [0, 1], chain(2), "never", streams=False)
    assert schedule.text() == (
        "device 0 compute  0F0 1copy0<0 0F1 1copy1<0 0copy1<1 0B1 0copy0<1 0B0 0step\n"
        "device 1 compute  1copy0<0 1F0 1copy1<0 1F1 1B1 0copy1<1 1B0 0copy0<1 1step"
    )
    assert len(schedule.ops()) == 2 * 2 * 2 + 2 * 2 + 2


def test_stages_on_one_device_share_its_queue_and_need_no_copy() -> None:
    """MadPipe's plans may give a device several stages: here 0 and 2 are on device 0."""
    assert gpipe(1, [0, 1, 0], [*chain(3), Transfer(0, 2, "up")], "never").text() == (
        "device 0 compute  0F0 2F0 2B0 0B0 0step 2step\n"
        "device 0 copy in  2copy0<1 0copy0<1\n"
        "device 1 compute  1F0 1B0 1step\n"
        "device 1 copy in  1copy0<0 1copy0<2"
    )


def test_a_copy_carries_its_bytes_there_and_back() -> None:
    schedule = gpipe(1, [0, 1, 2], [*chain(3), Transfer(0, 2, "up", 7)], "never")
    copies = {str(op): (op.bytes, op.queue) for op in schedule.ops() if op.kind == "copy"}
    assert copies == {
        "1copy0<0": (100, "copy in"), "2copy0<1": (101, "copy in"), "2copy0<0:up": (7, "copy in"),
        "0copy0<1": (100, "copy in"), "1copy0<2": (101, "copy in"), "0copy0<2:up": (7, "copy in"),
    }  # fmt: skip


def waits_of(schedule: Schedule) -> dict[str, set[str]]:
    return {str(op): set(map(str, before)) for op, before in schedule.dependencies().items()}


def test_dependencies_are_the_arrows_of_the_picture() -> None:
    """
    0F0 -> 1copy0<0 -> 1F0 -> (all outputs) -> 1B0 -> 0copy0<1 -> 0B0 -> 0step
     \\-> 0R0 -------------------------------------------------/
    """
    assert waits_of(gpipe(2, [0, 1], chain(2), "except_last")) == {
        "0F0": set(), "1copy0<0": {"0F0"}, "1F0": {"0F0", "1copy0<0"},
        "0F1": set(), "1copy1<0": {"0F1"}, "1F1": {"0F1", "1copy1<0"},
        "1B1": {"1F1", "1F0"}, "0copy1<1": {"1B1"}, "0B1": {"0F1", "1B1", "0copy1<1"},
        "1R0": {"1F0"}, "1B0": {"1F0", "1F1", "1R0"}, "0copy0<1": {"1B0"},
        "0R0": {"0F0"}, "0B0": {"0F0", "0R0", "1B0", "0copy0<1"},
        "0step": {"0B0", "0B1"}, "1step": {"1B0", "1B1"},
    }  # fmt: skip


def test_a_portal_ties_its_two_stages() -> None:
    waits = waits_of(gpipe(1, [0, 1, 2], [*chain(3), Transfer(0, 2, "up")], "never"))
    assert waits["2copy0<0:up"] == {"0F0"}
    assert waits["2F0"] == {"1F0", "2copy0<1", "2copy0<0:up"}
    assert waits["0copy0<2:up"] == {"2B0"}
    assert waits["0B0"] == {"0F0", "1B0", "0copy0<1", "0copy0<2:up"}


def test_loss_of_each_micro_batch_alone_waits_for_no_other() -> None:
    schedule = replace(gpipe(2, [0], [], "never"), loss="each")
    assert waits_of(schedule)["0B1"] == {"0F1"}
    assert waits_of(gpipe(2, [0], [], "never"))["0B1"] == {"0F1", "0F0"}


@given(
    m=st.integers(1, 5),
    devices=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    mode=st.sampled_from(["always", "except_last", "never"]),
    portals=st.booleans(),
    dependency=st.booleans(),
    streams=st.booleans(),
    data=st.data(),
)
def test_every_gpipe_schedule_can_be_executed(
    m: int, devices: list[int], mode: str, portals: bool, dependency: bool, streams: bool, data: st.DataObject
) -> None:
    """No deadlock; each stage runs each task once; the trace is one that the schedule allows."""
    n = len(devices)
    ends = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda pair: pair[0] < pair[1])
    pairs = data.draw(st.lists(ends, max_size=3)) if n > 1 else []
    skips = [StageSkip(source, target, f"s{number}") for number, (source, target) in enumerate(pairs)]
    found = transfers([1] * (n - 1), skips, portals)
    schedule = gpipe(m, devices, found, mode, dependency, streams)
    trace = executed(schedule)
    assert violations(schedule, trace) == []
    tasks = [op for op in schedule.ops() if op.kind != "copy"]
    again = sum(recomputed(i, m, mode) for i in range(m))
    assert len(tasks) == n * (2 * m + again + 1)
    moved = [transfer for transfer in found if devices[transfer.source] != devices[transfer.target]]
    assert len(schedule.ops()) - len(tasks) == 2 * m * len(moved)
    assert {queue[1] for queue in trace.queues()} == ({"compute", "copy in"} if streams and moved else {"compute"})


@given(st.integers(1, 8), st.integers(1, 6))
def test_equal_stages_take_m_plus_n_minus_1_slots_each_way(m: int, n: int) -> None:
    """Without copies: m + n - 1 slots forward, as many backward, and one for the optimizer."""
    assert executed(gpipe(m, range(n), [], "never")).window_s == 2 * (m + n - 1) + 1


SCHEDULE = gpipe(2, [0, 1], chain(2), "never")


def changed(**spans: tuple[float, float]) -> Trace:
    """The trace of SCHEDULE with other times for some ops (F0_1 stands for 1F0)."""
    times = {name[-1] + name[:-2]: value for name, value in spans.items()}
    return Trace(
        tuple(
            replace(span, start_s=times[span.op][0], end_s=times[span.op][1]) if span.op in times else span
            for span in executed(SCHEDULE).spans
        )
    )


def test_violations_of_a_dependency() -> None:
    early = changed(F0_1=(0.5, 1.5))
    assert sorted(violations(SCHEDULE, early)) == [
        "1F0 started before 0F0 had ended", "1F0 started before 1copy0<0 had ended"
    ]  # fmt: skip
    assert violations(SCHEDULE, early, tolerance_s=1.5) == []


def test_violations_of_the_order_of_a_lane() -> None:
    swapped = changed(F0_0=(1, 2), F1_0=(0, 1))
    assert "device 0 compute: the schedule has 0F0 0F1 0B1 0B0 0step, ran 0F1 0F0 0B1 0B0 0step" in violations(
        SCHEDULE, swapped
    )


def test_violations_by_two_ops_of_a_lane_at_once() -> None:
    at_once = changed(F1_0=(0.25, 2))
    assert violations(SCHEDULE, at_once) == ["device 0 compute: 0F1 started before 0F0 had ended"]
    assert violations(SCHEDULE, at_once, tolerance_s=0.75) == []


def test_violations_by_missing_and_foreign_ops() -> None:
    spans = executed(SCHEDULE).spans
    missing = Trace(tuple(span for span in spans if span.op != "1B0"))
    assert violations(SCHEDULE, missing) == [
        "device 1 compute: the schedule has 1F0 1F1 1B1 1B0 1step, ran 1F0 1F1 1B1 1step"
    ]
    foreign = Trace((*spans, Span("0F0", 0, "host", 0, 1)))
    assert "device 0 host is not a queue of the schedule" in violations(SCHEDULE, foreign)
    assert len(violations(SCHEDULE, Trace(()))) == len(SCHEDULE.queues)


def test_text_of_a_schedule_without_lanes_is_empty() -> None:
    assert Schedule((), ()).text() == ""
    assert Schedule((QueueOps(0, "compute", ()),), (0,)).text() == "device 0 compute"


def test_transfers_with_and_without_portals() -> None:
    """
    stage     0       1       2       3
    portals   s ----------------------> t        one copy
    without   s ----> . ----> . ------> t        a copy to every stage in between
    """
    skip = StageSkip(0, 3, "s", 5)
    assert transfers([1, 2, 3], [skip], portals=True) == [
        Transfer(0, 1, "", 1), Transfer(1, 2, "", 2), Transfer(0, 3, "s", 5), Transfer(2, 3, "", 3)
    ]  # fmt: skip
    assert transfers([1, 2, 3], [skip], portals=False) == [
        Transfer(j, j + 1, part, 5 if part else j + 1) for j in range(3) for part in ("s", "")
    ]


@pytest.mark.parametrize(("portals", "elements"), [(True, 6_082_560), (False, 11_980_800)])
def test_copied_elements_of_the_unet_ablation(portals: bool, elements: int) -> None:
    """torchgpipe's Table 1: U-Net (5, 64), 192x192, balance 34 76 70 61; elements of one sample, one direction."""
    skips = [StageSkip(0, 3, "a", 2_359_296), StageSkip(1, 2, "b", 1_032_192), StageSkip(1, 3, "c", 1_179_648)]
    found = transfers([1_179_648, 36_864, 294_912], skips, portals)
    assert sum(transfer.bytes for transfer in found) == elements


def test_plan_transfers_leave_out_what_stays_in_a_stage() -> None:
    """
    layer   0   1 | 2   3 | 4
    skip    s-----------t           "far", between stages 0 and 1
                    s---t           "near", inside stage 1
            s-----------------t     "over", from stage 0 to stage 2
    """
    profile = ModelProfile(
        tuple(LayerProfile(output_bytes=10 + layer) for layer in range(5)),
        skips=(Skip(0, 3, 1, "far"), Skip(2, 3, 2, "near"), Skip(0, 4, 4, "over")),
    )
    plan = Plan.contiguous([2, 2, 1])
    assert plan_transfers(plan, profile, portals=True) == [
        Transfer(0, 1, "far", 1), Transfer(0, 1, "", 11), Transfer(0, 2, "over", 4), Transfer(1, 2, "", 13)
    ]  # fmt: skip
