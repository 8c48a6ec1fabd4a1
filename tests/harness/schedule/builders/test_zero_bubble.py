"""ZB-V against its paper and against torch.distributed.pipelining; interleaved 1F1B against torch's, too."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.op import Op
from harness.core.plan import Mesh, Plan, Stage
from harness.report.schedule_text import grid
from harness.schedule import Schedule
from harness.schedule.builders.interleaved import interleaved
from harness.schedule.builders.one_f_one_b import one_f_one_b
from harness.schedule.builders.zero_bubble import zbv
from harness.schedule.transfers import Transfer
from harness.schedule.validate import validation_errors
from harness.simulator import Simulation, simulate
from tests.support.violations import violations

FORWARD, FULL, INPUT, WEIGHT = "F", "B", "I", "W"
KINDS = {FORWARD: "F", FULL: "B", INPUT: "B", WEIGHT: "W"}
"""What torch calls I, the backward pass of the input, is our B where there is a W."""


def chain(stages: int, *more: Transfer) -> list[Transfer]:
    return [*more, *(Transfer(j, j + 1, bytes=100) for j in range(stages - 1))]


def placed(schedule: Schedule, m: int) -> Plan:
    return Plan(Mesh(), tuple(Stage(j, j, device) for j, device in enumerate(schedule.devices)), m)


def run(schedule: Schedule, m: int, forward_s: float, backward_s: float) -> Simulation:
    profile = ModelProfile((LayerProfile(forward_s=forward_s, backward_s=backward_s),) * len(schedule.devices))
    cluster = Cluster(devices_per_node=max(schedule.devices) + 1)
    done = simulate(schedule, placed(schedule, m), profile, cluster, MemoryModel())
    assert violations(schedule, done.trace) == []
    return done


def theirs(kind: str, m: int, n: int, chunks: int, rank: int) -> tuple[list[str], set[str]]:
    """torch's order for one rank, in our notation, and its kinds of actions; it needs no stages and no group."""
    from torch.distributed.pipelining import schedules

    made: Any = object.__new__(getattr(schedules, kind))
    made.pp_group_size, made._n_microbatches = n, m
    made.num_stages, made.n_local_stages = n * chunks, chunks
    made.microbatches_per_round = m // max(1, m // n)
    actions = [a for a in made._calculate_single_rank_operations(rank) if a is not None]
    order = [f"{a.stage_index}{KINDS[a.computation_type.value]}{a.microbatch_index}" for a in actions]
    return order, {a.computation_type.value for a in actions}


def tasks(schedule: Schedule, device: int) -> list[str]:
    return [str(op) for op in schedule.by_queue()[device, "compute"] if op.kind != "step"]


@pytest.mark.parametrize("n", range(1, 5))
@pytest.mark.parametrize("m", [1, 2, 3, 4, 6, 7, 8, 13])
def test_the_order_is_that_of_torch(n: int, m: int) -> None:
    """Also with fewer micro-batches than 2n - 1. torch splits every backward pass: none of them is a whole one."""
    schedule = zbv(m, n, [])
    for rank in range(n):
        order, kinds = theirs("ScheduleZBVZeroBubble", m, n, 2, rank)
        assert tasks(schedule, rank) == order
        assert kinds == {FORWARD, INPUT, WEIGHT}


@pytest.mark.parametrize(("n", "chunks"), [(1, 2), (2, 2), (2, 3), (3, 2), (4, 2), (4, 3)])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_interleaved_has_the_order_of_torch(n: int, chunks: int, rounds: int) -> None:
    for rank in range(n):
        order, kinds = theirs("ScheduleInterleaved1F1B", n * rounds, n, chunks, rank)
        assert tasks(interleaved(n * rounds, n, chunks, []), rank) == order
        assert kinds == {FORWARD, FULL}


def test_the_picture_in_its_documentation() -> None:
    assert zbv.__doc__ is not None
    lines = [line.strip() for line in zbv.__doc__.splitlines()]
    assert grid(zbv(3, 2, chain(4))) in "\n".join(lines)


@given(n=st.integers(1, 5), more=st.integers(0, 6), task=st.integers(1, 5))
def test_a_device_is_idle_for_n_minus_1_tasks(n: int, more: int, task: int) -> None:
    """If F, B and W take equally long: 6 m tasks, and n - 1 of bubble. 1F1B of whole stages has 6 (n - 1)."""
    m = 2 * n - 1 + more
    assert run(zbv(m, n, chain(2 * n)), m, task, 2 * task).figures["step_time_s"] == (6 * m + n - 1) * task
    whole = run(one_f_one_b(m, range(n), chain(n)), m, 2 * task, 4 * task)
    assert whole.figures["step_time_s"] == 6 * (m + n - 1) * task


@given(n=st.integers(1, 5), m=st.integers(1, 12))
def test_it_keeps_what_the_first_device_of_1f1b_keeps(n: int, m: int) -> None:
    """2n chunks, until their W; every device as many where there are enough micro-batches."""
    kept = [max(accumulate({"F": 1, "W": -1}.get(op.kind, 0) for op in queue.ops)) for queue in zbv(m, n, []).queues]
    assert max(kept) <= 2 * n
    assert m < 2 * n - 1 or kept == [2 * n] * n


@given(n=st.integers(1, 5), m=st.integers(1, 12), forward=st.integers(1, 9), backward=st.integers(1, 9))
def test_nothing_is_wrong_with_it(n: int, m: int, forward: int, backward: int) -> None:
    schedule = zbv(m, n, chain(2 * n))
    assert schedule.devices == (*range(n), *reversed(range(n)))
    assert validation_errors(schedule, placed(schedule, m)) == []
    assert sum(op.kind in ("F", "B", "W") for op in schedule.ops()) == 3 * 2 * n * m
    run(schedule, m, forward, backward)


def test_a_micro_batch_turns_round_without_a_message() -> None:
    """A skip goes with it where it changes the device."""
    schedule = zbv(1, 2, chain(4, Transfer(0, 1, "up"), Transfer(1, 2, "up"), Transfer(2, 3, "up")))
    queues = schedule.text().splitlines()
    assert queues[1] == "device 0 network  3copy0<2:up 3copy0<2 0copy0<1:up 0copy0<1"
    assert queues[3] == "device 1 network  1copy0<0:up 1copy0<0 2copy0<3:up 2copy0<3"


def test_gradients_leave_before_the_weights_have_theirs() -> None:
    before = zbv(1, 2, chain(4)).dependencies()
    assert before[Op(2, "copy", 0, "", 3)] == {Op(3, "B", 0)}
    assert before[Op(3, "W", 0)] == {Op(3, "B", 0)}
    assert before[Op(0, "step")] == {Op(0, "B", 0), Op(0, "W", 0)}
