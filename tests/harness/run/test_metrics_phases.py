"""The phases of a step, of traces made up and simulated."""

from __future__ import annotations

import pytest

from harness.core.cluster import Cluster, Link
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.plan import Mesh, Plan, Stage
from harness.core.trace import Span, Trace
from harness.run.metrics import phases_s
from harness.schedule.builders.myelin import myelin, split_into_chunks
from harness.simulator import simulate


def test_each_phase_is_that_of_the_device_where_it_is_longest() -> None:
    spans = (
        Span("0F0", 0, "compute", 1.0, 2.0), Span("1F0", 1, "compute", 2.5, 3.0), Span("1B0", 1, "compute", 3.0, 5.0),
        Span("0R0", 0, "compute", 4.0, 5.0), Span("0B0", 0, "compute", 5.0, 7.0),
        Span("0collective:all_reduce@tied/w", 0, "compute", 7.0, 8.0),
        Span("1collective:all_reduce@data/chunk0", 1, "network", 5.0, 6.0),
        Span("1collective:all_reduce@data/chunk1", 1, "network", 7.0, 9.0),
        Span("0collective:all_reduce@data/chunk0", 0, "network", 8.0, 9.0),
        Span("0copy:chunk0/bucket0a/in", 0, "copy in", 7.0, 8.5), Span("0step:chunk0/bucket0a", 0, "compute", 9.0, 9.5),
        Span("0copy:chunk0/bucket0a/out", 0, "copy out", 9.5, 10.5),
        Span("1copy0<0", 1, "copy in", 2.0, 2.5), Span("1step", 1, "compute", 9.0, 10.0),
    )  # fmt: skip
    assert phases_s(Trace(spans, ((0.5, 10.5),))) == {"pipelining": 6.5, "data_parallel": 4.0, "optimizer": 1.5}


def test_of_several_steps_the_median_counts() -> None:
    spans = [Span("0F0", 0, "compute", 10.0 * step, 10.0 * step + time, step) for step, time in enumerate((1, 7, 3))]
    found = phases_s(Trace(tuple(spans), tuple((10.0 * step, 10.0 * step + 8) for step in range(3))))
    assert found == {"pipelining": 3.0, "data_parallel": 0.0, "optimizer": 0.0}


def test_without_a_trace_nothing_is_known() -> None:
    assert phases_s(Trace(())) is None


def test_a_step_without_overlap_is_its_phases_one_after_the_other() -> None:
    profile = ModelProfile((LayerProfile(forward_s=1, backward_s=2, param_bytes=4000),))
    plan = Plan(Mesh(data=2), (Stage(0, 0, 0),), 3)
    cluster = Cluster(nodes=2, node_port=Link(0.0, 1e-3))
    schedule = myelin(3, [0], [], replicas=2, chunks=[split_into_chunks(1000, 4, 100, 0)], overlap=False)
    done = simulate(schedule, plan, profile, cluster, MemoryModel())
    assert phases_s(done.trace) == pytest.approx({"pipelining": 9.0, "data_parallel": 4.0, "optimizer": 0.0})
    assert done.figures["step_time_s"] == pytest.approx(13.0)
