from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.plan import Plan
from harness.core.problem import ProblemError
from harness.schedule.builders.gpipe import gpipe
from harness.schedule.builders.one_f_one_b import one_f_one_b
from harness.schedule.transfers import Transfer
from harness.schedule.validate import validation_errors
from harness.simulator import Simulation, simulate
from tests.problems import refused
from tests.support.quick import within_s
from tests.support.violations import violations


def chain(stages: int) -> list[Transfer]:
    return [Transfer(j, j + 1, bytes=100 + j) for j in range(stages - 1)]


def run(m: int, n: int, forward_s: float, backward_s: float, recompute: str = "never", saved: int = 0) -> Simulation:
    profile = ModelProfile((LayerProfile(forward_s=forward_s, backward_s=backward_s, saved_bytes=saved),) * n)
    schedule = one_f_one_b(m, range(n), chain(n), recompute)
    done = simulate(schedule, Plan.contiguous([1] * n, m), profile, Cluster(devices_per_node=n), MemoryModel())
    assert violations(schedule, done.trace) == []
    return done


def test_the_orders_of_the_picture() -> None:
    """Megatron-LM, Figure 3 (top of Figure 4), for three stages and four micro-batches."""
    assert one_f_one_b(4, range(3), []).text() == (
        "device 0 compute  0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3 0step\n"
        "device 1 compute  1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3 1step\n"
        "device 2 compute  2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2step"
    )


def test_fewer_micro_batches_than_stages_all_run_ahead() -> None:
    assert one_f_one_b(2, range(4), []).text() == (
        "device 0 compute  0F0 0F1 0B0 0B1 0step\n"
        "device 1 compute  1F0 1F1 1B0 1B1 1step\n"
        "device 2 compute  2F0 2F1 2B0 2B1 2step\n"
        "device 3 compute  3F0 3B0 3F1 3B1 3step"
    )


def test_messages_stand_in_the_network_of_the_device_that_gets_them() -> None:
    """Skips, too, and their gradients on the way back."""
    schedule = one_f_one_b(1, [5, 6, 7], [*chain(3), Transfer(0, 2, "up", 7)])
    assert schedule.text() == (
        "device 5 compute  0F0 0B0 0step\n"
        "device 5 network  0copy0<1 0copy0<2:up\n"
        "device 6 compute  1F0 1B0 1step\n"
        "device 6 network  1copy0<0 1copy0<2\n"
        "device 7 compute  2F0 2B0 2step\n"
        "device 7 network  2copy0<1 2copy0<0:up"
    )
    assert {queue.name: queue.rule for queue in schedule.queues} == {"compute": "in_order", "network": "fifo"}
    assert {str(op): (op.bytes, op.queue) for op in schedule.ops() if op.kind == "copy"} == {
        "1copy0<0": (100, "network"), "2copy0<1": (101, "network"), "2copy0<0:up": (7, "network"),
        "0copy0<1": (100, "network"), "1copy0<2": (101, "network"), "0copy0<2:up": (7, "network"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "last"), [("never", "1F0 1B0 1F1 1B1"), ("except_last", "1F0 1R0 1B0 1F1 1B1"),
                       ("always", "1F0 1R0 1B0 1F1 1R1 1B1")]
)  # fmt: skip
def test_recomputations_run_right_before_their_backward_task(mode: str, last: str) -> None:
    assert one_f_one_b(2, range(2), [], mode).text().splitlines()[1] == f"device 1 compute  {last} 1step"


@given(m=st.integers(1, 12), n=st.integers(1, 6), forward=st.integers(1, 8), backward=st.integers(1, 16))
def test_it_takes_m_plus_n_minus_1_rounds(m: int, n: int, forward: int, backward: int) -> None:
    figures = run(m, n, forward, backward).figures
    assert figures["step_time_s"] == (m + n - 1) * (forward + backward)
    assert figures["bubble_fraction"] == pytest.approx((n - 1) / (m + n - 1))


@given(m=st.integers(1, 12), n=st.integers(1, 6))
def test_stage_j_keeps_n_minus_j_micro_batches(m: int, n: int) -> None:
    """Between their forward and backward pass, in the order of the queue and in what the simulator counts in memory."""
    for j, queue in enumerate(one_f_one_b(m, range(n), []).queues):
        alive = accumulate({"F": 1, "B": -1}.get(op.kind, 0) for op in queue.ops)
        assert max(alive) == min(m, n - j)
    saved = [peak.contents.get("saved", 0) for peak in run(m, n, 1, 2, saved=1000).peaks]
    assert saved == [1000 * min(m, n - j) for j in range(n)]


@given(m=st.integers(1, 12), n=st.integers(1, 6), mode=st.sampled_from(["always", "except_last", "never"]))
def test_it_is_the_ops_of_gpipe_in_another_order(m: int, n: int, mode: str) -> None:
    schedule = one_f_one_b(m, range(n), chain(n), mode)
    assert sorted(map(str, schedule.ops())) == sorted(map(str, gpipe(m, range(n), chain(n), mode).ops()))
    assert validation_errors(schedule, Plan.contiguous([1] * n, m)) == []
    run(m, n, 1, 2, mode)


def test_two_stages_on_one_device_are_refused() -> None:
    with pytest.raises(ProblemError) as caught:
        one_f_one_b(2, [4, 5, 4], chain(3))
    assert [(one.key, one.hint) for one in refused(caught)] == [("stages 0 and 2", "3 devices, or interleaved stages")]


@pytest.mark.usefixtures("computation")
@pytest.mark.parametrize("build", [gpipe, one_f_one_b])
def test_a_large_schedule_is_built_in_a_fraction_of_a_second(build) -> None:  # type: ignore[no-untyped-def]
    """48 stages, 1,024 micro-batches: about 200,000 ops; 0.3 s of one core when it was written."""
    schedule = within_s(0.5, lambda: build(1024, range(48), chain(48), "never"))
    assert sum(len(queue.ops) for queue in schedule.queues) == 4 * 47 * 1024 + 2 * 1024 + 48
