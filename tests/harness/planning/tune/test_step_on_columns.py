"""The estimate on columns is that of the readable one, to the last bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from harness import simulator
from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.plan import Mesh
from harness.core.problem import CannotRun
from harness.planning.tune import step_time
from harness.planning.tune.candidates import Candidate
from harness.planning.tune.peak_memory import Held
from harness.planning.tune.step_on_columns import StepOnColumns
from harness.planning.tune.step_time import Estimate, Known
from harness.simulator import compiled, lower
from tests.harness.planning.tune.nets import NODE, Bench, net
from tests.harness.planning.tune.test_step_time import ENGINES
from tests.support.simulated_cases import CLUSTERS, MEMORIES, Case, cases
from tests.tiers import examples


@pytest.mark.fast
@settings(max_examples=examples(300))
@given(cases(), CLUSTERS, MEMORIES)
def test_an_estimate_on_columns_is_the_same(case: Case, cluster: Cluster, memory: MemoryModel) -> None:
    schedule, plan, profile = case
    given = schedule, plan, profile, cluster, memory
    try:
        replicas = lower(*given)
    except CannotRun:
        return
    on_columns = compiled.without_sharing(*given)
    if on_columns is None:
        return
    m, held = plan.micro_batches, [Held(min(2, plan.micro_batches), 1)] * len(plan.stages)
    expected = [step_time._Step(schedule, one, m).seconds(m + 30, held) for one in replicas]
    assert [StepOnColumns(schedule, one, m).seconds(m + 30, held) for one in on_columns] == expected


@pytest.mark.parametrize("cores", [0, 1.5])
@pytest.mark.parametrize(("typed", "mesh"), ENGINES)
def test_large_schedules_are_estimated_on_columns(
    typed: list[str], mesh: Mesh, cores: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, one = Bench(*typed, cluster=replace(NODE, cores=cores)), Candidate(1, mesh, 8 * mesh.data)
    layout = bench.layout(one, net([1e-3, 2e-3, 1e-3, 1e-3, 3e-3, 1e-3, 1e-3, 1e-3]))
    expected = Estimate(bench.engine, layout, Known()).seconds()
    monkeypatch.setattr(simulator, "LARGE_OPS", 0)
    monkeypatch.setattr(simulator, "START_OPS", 0)
    monkeypatch.delattr(step_time, "lower")
    assert Estimate(bench.engine, layout, Known()).seconds() == expected


def test_what_a_search_simulates_later_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An estimate of 33 ops stands for some schedules that will be simulated."""
    bench, one = Bench("engine=gpipe"), Candidate(1, Mesh(1, 2), 4)
    estimate = Estimate(bench.engine, bench.layout(one, net([1e-3] * 8)), Known())
    ops = sum(len(queue.ops) for queue in estimate.schedule.queues)
    asked: list[bool] = []
    monkeypatch.setattr(simulator, "_compiled", lambda: asked.append(True))
    monkeypatch.setattr(simulator, "LARGE_OPS", ops)
    for start, loaded in ((step_time.SCHEDULES * ops + 1, 0), (step_time.SCHEDULES * ops, 1)):
        monkeypatch.setattr(simulator, "_seen_ops", 0)
        monkeypatch.setattr(simulator, "START_OPS", start)
        estimate.seconds()
        assert len(asked) == loaded
