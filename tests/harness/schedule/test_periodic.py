from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cluster import Cluster, Link
from harness.memory import MemoryModel
from harness.op import Op
from harness.pattern import Pattern, Placed
from harness.plan import Plan
from harness.profile import LayerProfile, ModelProfile
from harness.schedule import Schedule, violations
from harness.schedule.faults import faults
from harness.schedule.hops import Hop
from harness.schedule.one_f_one_b import one_f_one_b
from harness.schedule.periodic import pattern_faults, unrolled
from harness.simulate import simulate


def placed(text: str, start_s: float, shift: int, device: int | None = None) -> Placed:
    op = Op.parse(text)
    if op.kind == "copy":
        op = replace(op, queue="network", bytes=100)
    return Placed(op, op.stage if device is None else device, start_s, shift)


TWO = Pattern(3, (placed("0F0", 0, 0), placed("1F0", 1, 0), placed("1B0", 2, 0), placed("0B0", 1, 1)))
"""
period    |0     |3     |6
device 0  |0F 0B-|          0B of the micro-batch before
device 1  |-  1F  1B-       over the end of the period
"""
TWO_S = {"0F0": 1.0, "1F0": 1.0, "1B0": 2.0, "0B0": 2.0}

FAR = Pattern(3, (placed("0F0", 0, 0), placed("1copy0<0", 1, 0), placed("1F0", 2, 0), placed("1B0", 0, 1),
                  placed("0copy0<1", 2, 1), placed("0B0", 1, 2)))  # fmt: skip
"""The same with messages of a second in each direction: 0B is two periods late, not one."""
FAR_S = TWO_S | {"1copy0<0": 1.0, "0copy0<1": 1.0}


def period_s(schedule: Schedule, m: int, link: Link = Link()) -> float:  # noqa: B008
    profile = ModelProfile((LayerProfile(forward_s=1, backward_s=2, saved_bytes=10),) * 2)
    cluster = Cluster(devices_per_node=2, intra=link)
    done = simulate(schedule, Plan.contiguous([1, 1], m), profile, cluster, MemoryModel())
    assert violations(schedule, done.trace) == []
    return done.figures["step_time_s"] / m


def test_unrolled_looks_like_the_picture() -> None:
    assert unrolled(TWO, 3, [0, 1], []).text() == (
        "device 0 compute  0F0 0F1 0B0 0F2 0B1 0B2 0step\ndevice 1 compute  1F0 1B0 1F1 1B1 1F2 1B2 1step"
    )


def test_the_shifts_say_how_many_micro_batches_are_alive() -> None:
    assert unrolled(FAR, 4, [0, 1], []).text() == (
        "device 0 compute  0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3 0step\n"
        "device 0 network  0copy0<1 0copy1<1 0copy2<1 0copy3<1\n"
        "device 1 compute  1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1step\n"
        "device 1 network  1copy0<0 1copy1<0 1copy2<0 1copy3<0"
    )


def test_messages_that_the_pattern_does_not_place_are_added() -> None:
    hops = [Hop(0, 1, bytes=5)]
    assert unrolled(TWO, 2, [0, 1], hops).lanes[1] == one_f_one_b(2, [0, 1], hops).lanes[1]
    alone = {str(op): op.bytes for op in unrolled(FAR, 1, [0, 1], hops).ops() if op.kind == "copy"}
    assert alone == {"1copy0<0": 100, "0copy0<1": 100}  # those of the pattern
    both = [*hops, Hop(0, 1, "up", 6)]
    assert {str(op) for op in unrolled(FAR, 1, [0, 1], both).ops() if op.kind == "copy"} == {
        "1copy0<0", "0copy0<1", "1copy0<0:up", "0copy0<1:up"
    }  # fmt: skip


@pytest.mark.parametrize(("pattern", "link"), [(TWO, Link()), (FAR, Link(alpha_s=1))])
def test_a_long_step_takes_a_period_for_each_micro_batch(pattern: Pattern, link: Link) -> None:
    schedule = unrolled(pattern, 400, [0, 1], [Hop(0, 1)])
    assert faults(schedule, Plan.contiguous([1, 1], 400)) == []
    assert period_s(schedule, 400, link) == pytest.approx(3, rel=0.02)


def test_one_micro_batch_less_in_flight_misses_the_period() -> None:
    """So the shift matters: 1F1B of two stages keeps two, and waits for the messages."""
    assert period_s(one_f_one_b(400, [0, 1], [Hop(0, 1)]), 400, Link(alpha_s=1)) == pytest.approx(4, rel=0.02)


def test_a_task_away_from_its_stage_is_refused() -> None:
    with pytest.raises(ValueError, match=r"1F0 of stage 1   is on device 1 in the pattern, its stage on device 3"):
        unrolled(TWO, 2, [0, 3], [])


@pytest.mark.parametrize("period", [0, -1, float("nan"), float("inf")])
def test_a_period_is_a_number_above_zero(period: float) -> None:
    with pytest.raises(ValueError, match=r"period_s is .*, must be a finite number above 0"):
        Pattern(period, ())


def test_good_patterns_have_no_faults() -> None:
    assert pattern_faults(TWO, TWO_S) == []
    assert pattern_faults(FAR, FAR_S) == []


def test_the_micro_batch_of_a_placed_op_means_nothing() -> None:
    other = replace(TWO, ops=(placed("0F7", 0, 0), *TWO.ops[1:]))
    assert pattern_faults(other, {"0F7": 1.0} | TWO_S) == []
    assert unrolled(other, 3, [0, 1], []) == unrolled(TWO, 3, [0, 1], [])


def test_an_op_longer_than_the_period() -> None:
    found = pattern_faults(TWO, TWO_S | {"1B0": 3.5})
    assert "1B0 of stage 1   takes 3.5 s, the period is 3 s   -> a longer period" in found


def test_an_overlap_over_the_end_of_the_period() -> None:
    """1B runs from 2 to 4.5, which is 1.5 of the next period; 1F starts at 1."""
    assert pattern_faults(TWO, TWO_S | {"1B0": 2.5})[0] == (
        "1F0 of stage 1   overlaps 1B0 on device 1 compute   -> a longer period, or another start"
    )


def test_a_start_in_a_later_period_is_one_in_this_period() -> None:
    """0F at 7 is 0F at 1, in the middle of 0B."""
    far = tuple(replace(p, start_s=p.start_s + 3 * k) for k, p in enumerate(TWO.ops))
    assert pattern_faults(replace(TWO, ops=far), TWO_S) == []
    late = replace(TWO, ops=(placed("0F0", 7, 0), *(replace(p, shift=p.shift + 9) for p in TWO.ops[1:])))
    assert pattern_faults(late, TWO_S) == [
        "0B0 of stage 0   overlaps 0F0 on device 0 compute   -> a longer period, or another start"
    ]


def test_a_link_carries_one_message_at_a_time() -> None:
    """Both directions together with half duplex."""
    both = replace(FAR, ops=(*FAR.ops[:4], placed("0copy0<1", 1, 2), placed("0B0", 2, 2)))
    seconds = FAR_S | {"0B0": 1.0}
    assert pattern_faults(both, seconds, duplex="full") == []
    assert pattern_faults(both, seconds, duplex="half") == [
        "0copy0<1 of stage 0   overlaps 1copy0<0 on link 0 -- 1   -> a longer period, or another start"
    ]


def test_an_op_before_what_it_waits_for() -> None:
    early = replace(TWO, ops=(*TWO.ops[:3], placed("0B0", 1, 0)))
    assert pattern_faults(early, TWO_S) == [
        "0B0 of stage 0   starts 3 s before 1B0 of its micro-batch has ended   -> shift 1"
    ]


def test_doubled_ops_and_missing_durations() -> None:
    double = replace(TWO, ops=(*TWO.ops, TWO.ops[0]))
    assert pattern_faults(double, {"0F0": 1.0, "1F0": 1.0, "0B0": 2.0}) == [
        "0F0 of stage 0   stands twice in the pattern   -> once",
        "1B0 of stage 1   has no duration   -> one for each op of the pattern",
    ]


@given(
    period=st.integers(1, 12),
    tasks=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 4)), min_size=1, max_size=5),
)
def test_overlaps_are_those_of_a_table_of_slots(period: int, tasks: list[tuple[int, int]]) -> None:
    """Brute force: each op takes its slots modulo the period, and no slot may be taken twice."""
    pattern = Pattern(period, tuple(Placed(Op(j, "F", 0), 0, start, 50 * j) for j, (start, _) in enumerate(tasks)))
    taken = [slot % period for start, length in tasks for slot in range(start, start + length)]
    found = pattern_faults(pattern, {f"{j}F0": length for j, (_, length) in enumerate(tasks)})
    assert bool(found) == (len(set(taken)) < len(taken))
