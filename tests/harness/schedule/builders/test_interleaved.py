from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.plan import Mesh, Plan, Stage
from harness.core.problem import ProblemError
from harness.schedule import Schedule
from harness.schedule.builders.interleaved import interleaved, turns
from harness.schedule.builders.one_f_one_b import one_f_one_b
from harness.schedule.transfers import Transfer
from harness.schedule.validate import validation_errors
from harness.simulator import simulate
from tests.problems import refused, rows
from tests.support.violations import violations


def chain(stages: int) -> list[Transfer]:
    return [Transfer(j, j + 1, bytes=100) for j in range(stages - 1)]


def step_s(schedule: Schedule, m: int, forward_s: float, backward_s: float) -> float:
    profile = ModelProfile((LayerProfile(forward_s=forward_s, backward_s=backward_s),) * len(schedule.devices))
    plan = Plan(Mesh(), tuple(Stage(j, j, device) for j, device in enumerate(schedule.devices)), m)
    done = simulate(schedule, plan, profile, Cluster(devices_per_node=max(schedule.devices) + 1), MemoryModel())
    assert violations(schedule, done.trace) == []
    return done.figures["step_time_s"]


def passes(schedule: Schedule, device: int) -> str:
    return " ".join(str(op) for op in schedule.by_queue()[device, "compute"] if op.kind in ("F", "B"))


def test_the_orders_of_the_picture() -> None:
    schedule = interleaved(4, 2, 2, [])
    assert schedule.devices == (0, 1, 0, 1)
    assert passes(schedule, 0) == "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3"
    assert passes(schedule, 1) == "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"


def test_the_first_and_last_device_of_the_papers_figure() -> None:
    """Megatron-LM, Figure 4 (bottom): 4 devices, 2 chunks, 8 micro-batches; device 3 holds the stages 3 and 7.

    Before the first backward pass device 0 runs 1 2 3 4 | 1 2 3 4 | 5 6 7, device 3 runs 1 2 3 4 | 1.
    """
    schedule = interleaved(8, 4, 2, [])
    assert passes(schedule, 0).split("4B0")[0] == "0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0F4 0F5 0F6 "
    assert passes(schedule, 3).split("7B1")[0] == "3F0 3F1 3F2 3F3 7F0 7B0 7F1 "
    assert passes(schedule, 0).endswith("0B3 4B4 4B5 4B6 4B7 0B4 0B5 0B6 0B7")


def test_turns_go_through_the_chunks_in_groups() -> None:
    assert turns(4, 2, range(2)) == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]


@given(
    groups=st.integers(1, 4), n=st.integers(1, 5), v=st.integers(1, 4), forward=st.integers(1, 5),
    backward=st.integers(1, 9),
)  # fmt: skip
def test_the_bubble_is_that_of_1f1b_divided_by_the_chunks(
    groups: int, n: int, v: int, forward: int, backward: int
) -> None:
    """m (F + B) of work for each device, and a bubble of (n - 1)(F + B) / v, where a chunk takes F / v and B / v."""
    m = groups * n
    taken = step_s(interleaved(m, n, v, chain(n * v)), m, forward, backward)
    assert taken == m * v * (forward + backward) + (n - 1) * (forward + backward)
    assert step_s(one_f_one_b(m, range(n), chain(n)), m, v * forward, v * backward) == (
        (m + n - 1) * v * (forward + backward)
    )


@given(
    groups=st.integers(1, 4), n=st.integers(1, 5), v=st.integers(1, 4),
    mode=st.sampled_from(["always", "except_last", "never"]),
)  # fmt: skip
def test_every_stage_runs_every_micro_batch_once(groups: int, n: int, v: int, mode: str) -> None:
    m = groups * n
    schedule = interleaved(m, n, v, chain(n * v), mode)
    assert validation_errors(schedule, Plan(Mesh(), tuple(Stage(j, j, j % n) for j in range(n * v)), m)) == []
    tasks = [op for op in schedule.ops() if op.kind != "copy"]
    again = {"always": m, "except_last": m - 1, "never": 0}[mode]
    assert len(tasks) == n * v * (2 * m + again + 1)
    assert len(schedule.ops()) - len(tasks) == (2 * m * (n * v - 1) if n > 1 else 0)
    assert step_s(schedule, m, 1, 2) >= m * v * 3


def test_one_chunk_is_1f1b() -> None:
    assert interleaved(3, 2, 1, chain(2)) == one_f_one_b(3, range(2), chain(2))


@pytest.mark.parametrize(("m", "near"), [(6, [4, 8]), (3, [4])])
def test_micro_batches_must_fill_the_devices(m: int, near: list[int]) -> None:
    with pytest.raises(ProblemError) as caught:
        interleaved(m, 4, 2, chain(8))
    assert rows(refused(caught)) == [("batch.micro_batches", m, [f"batch.micro_batches={one}" for one in near])]
