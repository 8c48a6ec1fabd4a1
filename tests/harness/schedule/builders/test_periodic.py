from __future__ import annotations

from dataclasses import replace

import pytest

from harness.core.cluster import Cluster, Link
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.op import Op
from harness.core.pattern import Pattern
from harness.core.plan import Plan
from harness.core.problem import ProblemError
from harness.schedule import Schedule
from harness.schedule.builders.one_f_one_b import one_f_one_b
from harness.schedule.builders.periodic import unrolled
from harness.schedule.transfers import Transfer
from harness.schedule.validate import validation_errors
from harness.simulator import simulate
from tests.problems import refused
from tests.support.patterns import FAR, TWO, placed
from tests.support.violations import violations


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
    transfers = [Transfer(0, 1, bytes=5)]
    assert unrolled(TWO, 2, [0, 1], transfers).queues[1] == one_f_one_b(2, [0, 1], transfers).queues[1]
    alone = {str(op): op.bytes for op in unrolled(FAR, 1, [0, 1], transfers).ops() if op.kind == "copy"}
    assert alone == {"1copy0<0": 100, "0copy0<1": 100}  # those of the pattern
    both = [*transfers, Transfer(0, 1, "up", 6)]
    assert {str(op) for op in unrolled(FAR, 1, [0, 1], both).ops() if op.kind == "copy"} == {
        "1copy0<0", "0copy0<1", "1copy0<0:up", "0copy0<1:up"
    }  # fmt: skip


@pytest.mark.parametrize(("pattern", "link"), [(TWO, Link()), (FAR, Link(alpha_s=1))])
def test_a_long_step_takes_a_period_for_each_micro_batch(pattern: Pattern, link: Link) -> None:
    schedule = unrolled(pattern, 400, [0, 1], [Transfer(0, 1)])
    assert validation_errors(schedule, Plan.contiguous([1, 1], 400)) == []
    assert period_s(schedule, 400, link) == pytest.approx(3, rel=0.02)


def test_one_micro_batch_less_in_flight_misses_the_period() -> None:
    """So the shift matters: 1F1B of two stages keeps two, and waits for the messages."""
    assert period_s(one_f_one_b(400, [0, 1], [Transfer(0, 1)]), 400, Link(alpha_s=1)) == pytest.approx(4, rel=0.02)


def test_a_task_away_from_its_stage_is_refused() -> None:
    with pytest.raises(ProblemError) as caught:
        unrolled(TWO, 2, [0, 3], [])
    assert [(one.key, one.hint) for one in refused(caught)] == [("1F0 of stage 1", "device 3")]


@pytest.mark.parametrize("period", [0, -1, float("nan"), float("inf")])
def test_a_period_is_a_number_above_zero(period: float) -> None:
    with pytest.raises(ValueError, match=r"period_s is .*, must be a finite number above 0"):
        Pattern(period, ())


def test_the_micro_batch_of_a_placed_op_means_nothing() -> None:
    other = replace(TWO, ops=(placed("0F7", 0, 0), *TWO.ops[1:]))
    assert unrolled(other, 3, [0, 1], []) == unrolled(TWO, 3, [0, 1], [])


def test_a_start_in_a_later_period_is_one_in_this_period() -> None:
    far = tuple(replace(p, start_s=p.start_s + 3 * k, shift=p.shift - k) for k, p in enumerate(TWO.ops))
    assert unrolled(replace(TWO, ops=far), 5, [0, 1], []) == unrolled(TWO, 5, [0, 1], [])


def test_messages_get_in_line_in_the_order_of_the_pattern() -> None:
    """For each pair of devices, both directions together."""
    lines = unrolled(FAR, 3, [0, 1], []).message_order
    assert [" ".join(map(str, line)) for line in lines] == ["1copy0<0 1copy1<0 0copy0<1 1copy2<0 0copy1<1 0copy2<1"]
    assert unrolled(TWO, 3, [0, 1], [Transfer(0, 1)]).message_order == ()


def test_the_optimizer_steps_every_so_many_micro_batches_and_at_the_end() -> None:
    schedule = unrolled(TWO, 5, [0, 1], [Transfer(0, 1)], update_every=2)
    assert (
        " ".join(map(str, schedule.by_queue()[0, "compute"]))
        == "0F0 0F1 0B0 0F2 0B1 0step1 0F3 0B2 0F4 0B3 0step3 0B4 0step4"
    )
    assert (
        " ".join(map(str, schedule.by_queue()[1, "compute"]))
        == "1F0 1B0 1F1 1B1 1step1 1F2 1B2 1F3 1B3 1step3 1F4 1B4 1step4"
    )
    assert validation_errors(schedule, Plan.contiguous([1, 1], 5)) == []
    assert unrolled(TWO, 4, [0, 1], [], update_every=2).ops()[-1] == Op(1, "step", 3)
    assert [op for op in unrolled(TWO, 3, [0, 1], [], update_every=9).ops() if op.kind == "step"] == [
        Op(0, "step", 2), Op(1, "step", 2)
    ]  # fmt: skip


def test_a_step_waits_for_the_gradients_up_to_its_micro_batch_and_for_the_step_before() -> None:
    before = unrolled(TWO, 5, [0, 1], [], update_every=2).dependencies()
    assert before[Op(0, "step", 1)] == {Op(0, "B", 0), Op(0, "B", 1)}
    assert before[Op(0, "step", 3)] == {Op(0, "step", 1), Op(0, "B", 2), Op(0, "B", 3)}
    assert before[Op(0, "step", 4)] == {Op(0, "step", 3), Op(0, "B", 4)}
    assert unrolled(TWO, 2, [0, 1], []).dependencies()[Op(0, "step")] == {Op(0, "B", 0), Op(0, "B", 1)}


def test_a_step_comes_after_the_gradients_of_weights_where_they_are_tasks() -> None:
    halved = replace(TWO, ops=(*TWO.ops[:2], placed("1B0", 2, 0), placed("1W0", 0, 2), TWO.ops[3]))
    schedule = unrolled(halved, 3, [0, 1], [], update_every=2)
    assert " ".join(map(str, schedule.by_queue()[1, "compute"])) == "1F0 1B0 1F1 1B1 1W0 1F2 1B2 1W1 1step1 1W2 1step2"
    assert Op(1, "W", 1) in schedule.dependencies()[Op(1, "step", 1)]


def test_updates_need_micro_batches() -> None:
    with pytest.raises(ValueError, match=r"update_every is 0, must be at least 1"):
        unrolled(TWO, 2, [0, 1], [], update_every=0)
