from __future__ import annotations

import pytest

from harness.core.plan import Mesh
from harness.core.problem import NoPlan
from planners.summa import Config, build
from tests.harness.sbp.nets import dense
from tests.planners.tensor_parallel_cases import ADAM, cluster, request


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_best_mesh_and_what_each_device_receives(micro_batches):
    """Of the model's input and its weight: no gradient of the input, so two thirds of the paper's formula."""
    profile = dense((64, 32))
    found = build(Config()).plan(profile, cluster(8), ADAM, request(profile, 8, micro_batches))
    inputs, weights = 4 * 64 * 64, 4 * 64 * 32
    received = {
        (rows, 8 // rows): 2 * (inputs / rows * (1 - rows / 8) + weights * rows / 8 * (1 - 1 / rows))
        for rows in (1, 2, 4, 8)
    }
    assert found.mesh == Mesh(tensor=8)
    (best,) = found.strategy.values()
    assert sum(one.bytes for one in found.traffic[0]) == received[best]
    seconds = {f"{one.algorithm}@{one.phase}": one.seconds for one in found.traffic[0]}
    assert seconds["broadcast@forward"] == pytest.approx(seconds["broadcast@backward"] + seconds["reduce@backward"])
    assert sum(seconds.values()) * micro_batches == pytest.approx(found.predicted["communication_s"])
    assert sum(found.predicted["communication_by_phase_s"].values()) == pytest.approx(
        found.predicted["communication_s"]
    )


def test_it_shares_weights_and_what_waits_for_the_backward_pass_evenly():
    profile = dense((64, 128, 32))
    found = build(Config()).plan(profile, cluster(8), ADAM, request(profile, 8))
    weights, inputs = 4 * (64 * 128 + 128 * 32), 4 * 64 * (64 + 128)
    assert found.predicted["held_bytes"] == (4 * weights + inputs) / 8


def test_sizes_that_do_not_divide_are_padded_in_plans_alone():
    profile = dense((63, 31))
    wanted = request(profile, 8)
    with pytest.raises(NoPlan, match="no mesh of SUMMA's"):
        build(Config()).plan(profile, cluster(8), ADAM, wanted)
    assert build(Config(padded=True)).plan(profile, cluster(8), ADAM, wanted).strategy.keys() == {"linear_0"}
