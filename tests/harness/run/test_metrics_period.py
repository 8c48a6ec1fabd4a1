"""The period of a trace, simulated or made up."""

from __future__ import annotations

import pytest

from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.plan import Plan
from harness.core.trace import Span, Trace
from harness.run.metrics import period_s
from harness.schedule import Schedule
from harness.schedule.builders.one_f_one_b import one_f_one_b
from harness.schedule.builders.periodic import unrolled
from harness.simulator import simulate
from tests.support.patterns import TWO


def trace_of(schedule: Schedule, m: int) -> Trace:
    profile = ModelProfile((LayerProfile(forward_s=1, backward_s=2),) * 2)
    return simulate(schedule, Plan.contiguous([1, 1], m), profile, Cluster(devices_per_node=2), MemoryModel()).trace


@pytest.mark.parametrize(("m", "every"), [(8, 2), (8, 8), (2, 1)])
def test_a_pattern_has_its_period_without_filling_and_draining(m: int, every: int) -> None:
    trace = trace_of(unrolled(TWO, m, [0, 1], [], every), m)
    assert trace.window_s > 3 * m
    assert period_s(trace) == pytest.approx(3)


def test_a_schedule_that_drains_before_it_updates_has_none() -> None:
    assert period_s(trace_of(one_f_one_b(8, [0, 1], []), 8)) is None
    assert period_s(Trace(())) is None


def test_a_single_micro_batch_has_none() -> None:
    assert period_s(trace_of(unrolled(TWO, 1, [0, 1], [], 1), 1)) is None


def test_all_steps_count_and_time_between_them_does_not() -> None:
    spans = [Span("0step0", 0, "compute", 0, 0)]
    for step, begin, period in ((0, 0.0, 1.0), (1, 100.0, 3.0), (2, 300.0, 2.0)):
        spans += [Span(f"0B{i}", 0, "compute", begin + i * period, begin + i * period + 0.5, step) for i in range(2)]
    assert period_s(Trace(tuple(spans))) == 2.0
