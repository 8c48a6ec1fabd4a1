from __future__ import annotations

import pytest

from harness.core.plan import Mesh
from planners.summa import Config, build
from tests.harness.sbp.nets import dense
from tests.planners.tensor_parallel_cases import ADAM, cluster, request


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_best_mesh_and_what_each_device_receives(micro_batches):
    """Inputs along rows, weights along columns: 3 (|I| / rows + |W| / columns) for each micro-batch."""
    profile = dense((64, 32))
    found = build(Config()).plan(profile, cluster(8), ADAM, request(profile, 8, micro_batches))
    inputs, weights = 4 * 64 * 64, 4 * 64 * 32
    received = {
        (rows, 8 // rows): 3 * (inputs / rows * (rows < 8) + weights * rows / 8 * (rows > 1)) for rows in (1, 2, 4, 8)
    }
    best = tuple(found.predicted["summa_mesh"])
    assert received[best] == min(received.values())
    assert sum(one.bytes for one in found.traffic[0]) == pytest.approx(received[best], abs=2)
    times = {one.phase: one.seconds for one in found.traffic[0]}
    assert times["backward"] == pytest.approx(2 * times["forward"])
    assert sum(times.values()) * micro_batches == pytest.approx(found.predicted["communication_s"])
    by_phase = found.predicted["communication_by_phase_s"]
    assert sum(by_phase.values()) == pytest.approx(found.predicted["communication_s"])


def test_it_is_a_cost_without_strategies_and_shares_all_evenly():
    profile = dense((64, 128, 32))
    found = build(Config()).plan(profile, cluster(8), ADAM, request(profile, 8))
    assert (found.strategy, found.layouts, found.mesh) == ({}, {}, Mesh(tensor=8))
    weights, inputs = 4 * (64 * 128 + 128 * 32), 4 * 64 * (64 + 128)
    assert found.predicted["held_bytes"] == (4 * weights + inputs) / 8
