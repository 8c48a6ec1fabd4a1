from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.plan import Plan
from harness.report.schedule_text import grid
from harness.schedule import Schedule
from harness.schedule.builders.fill_drain import fill_drain
from harness.schedule.builders.gpipe import gpipe
from harness.schedule.transfers import Transfer
from harness.schedule.validate import validation_errors
from harness.simulator import Simulation, simulate
from tests.support.violations import violations


def chain(stages: int) -> list[Transfer]:
    return [Transfer(j, j + 1, bytes=100) for j in range(stages - 1)]


def run(schedule: Schedule, m: int, forward_s: float, backward_s: float) -> Simulation:
    n = len(schedule.devices)
    profile = ModelProfile((LayerProfile(forward_s=forward_s, backward_s=backward_s, saved_bytes=1000),) * n)
    done = simulate(schedule, Plan.contiguous([1] * n, m), profile, Cluster(devices_per_node=n), MemoryModel())
    assert violations(schedule, done.trace) == []
    return done


@pytest.mark.parametrize("n", range(1, 5))
@pytest.mark.parametrize("m", [1, 2, 3, 5, 8])
def test_the_order_is_that_of_torch(n: int, m: int) -> None:
    from torch.distributed.pipelining.schedules import ScheduleGPipe

    theirs = ScheduleGPipe.__new__(ScheduleGPipe)  # its order needs no stage and no group
    theirs._num_stages, theirs._n_microbatches = n, m
    orders = theirs._get_pipeline_order()
    assert orders is not None
    for j, queue in enumerate(fill_drain(m, range(n), []).queues):
        actions = [action for action in orders[j] if action is not None and action.microbatch_index is not None]
        assert [(op.stage, op.kind, op.micro_batch) for op in queue.ops[:-1]] == [
            (action.stage_index, action.computation_type.value, action.microbatch_index) for action in actions
        ]


def test_the_picture_in_its_documentation() -> None:
    assert fill_drain.__doc__ is not None
    lines = [line.strip() for line in fill_drain.__doc__.splitlines()]
    assert grid(fill_drain(3, range(3), chain(3))) in "\n".join(lines)


def test_messages_and_recomputations() -> None:
    assert fill_drain(2, [5, 6], [Transfer(0, 1, "up", 7), *chain(2)], "except_last").text() == (
        "device 5 compute  0F0 0F1 0R0 0B0 0B1 0step\n"
        "device 5 network  0copy0<1:up 0copy0<1 0copy1<1:up 0copy1<1\n"
        "device 6 compute  1F0 1F1 1R0 1B0 1B1 1step\n"
        "device 6 network  1copy0<0:up 1copy0<0 1copy1<0:up 1copy1<0"
    )


@given(
    m=st.integers(1, 9), n=st.integers(1, 5), forward=st.integers(1, 8), backward=st.integers(1, 16),
    mode=st.sampled_from(["always", "except_last", "never"]),
)  # fmt: skip
def test_it_is_gpipe_with_the_backward_passes_the_other_way_round(
    m: int, n: int, forward: int, backward: int, mode: str
) -> None:
    """The same ops, without recomputation the same time, and every stage keeps all micro-batches."""
    schedule = fill_drain(m, range(n), chain(n), mode)
    assert sorted(map(str, schedule.ops())) == sorted(map(str, gpipe(m, range(n), chain(n), mode).ops()))
    assert validation_errors(schedule, Plan.contiguous([1] * n, m)) == []
    run(schedule, m, forward, backward)
    done = run(fill_drain(m, range(n), chain(n)), m, forward, backward)
    assert done.figures["step_time_s"] == (m + n - 1) * (forward + backward)
    assert [peak.contents["saved"] for peak in done.peaks] == [1000 * m] * n
