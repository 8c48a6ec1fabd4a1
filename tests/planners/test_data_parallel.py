from __future__ import annotations

import pytest

from harness.core.problem import CannotRun, NoPlan
from planners.data_parallel import Config, build, check
from planners.megatron import Config as Megatron
from planners.megatron import build as megatron
from tests.harness.sbp.nets import dense, transformer
from tests.planners.tensor_parallel_cases import ADAM, cluster, request
from tests.problems import refused, row, rows


def plan(profile, devices: int = 8, memory_bytes: int = 10**12, **config):
    there = cluster(devices, memory_bytes=memory_bytes)
    return build(Config(**config)).plan(profile, there, ADAM, request(profile, devices))


def test_only_gradients_are_sent_each_weight_whole():
    profile = dense((64, 128, 32))
    found = plan(profile)
    assert set(found.strategy.values()) == {(8, 1, 1)}
    ((traffic,),) = found.traffic
    weights = sum(layer.param_bytes for layer in profile.layers)
    assert (traffic.algorithm, traffic.phase, traffic.bytes) == ("all_reduce", "weights", 2 * 7 * weights // 8)


def test_one_weight_at_both_ends_is_summed_once():
    profile = transformer()
    ((traffic,),) = plan(profile).traffic
    words = profile.layers[0].param_bytes
    assert traffic.bytes == 2 * 7 * (sum(layer.param_bytes for layer in profile.layers) - words) // 8


def test_ends_are_split_by_samples_anyway():
    """It costs the same; it is compared with Megatron under the same convention."""
    profile = dense((64, 128, 32))
    free, split = plan(profile), plan(profile, ends="batch_split")
    assert split.predicted["communication_s"] == free.predicted["communication_s"]
    assert split.layouts["output"] == ((8,),) and "output" not in free.layouts
    other = megatron(Megatron(ends="batch_split")).plan(profile, cluster(), ADAM, request(profile))
    assert split.predicted["baselines"] == other.predicted["baselines"] != free.predicted["baselines"]


def test_values_that_no_run_can_have():
    with pytest.raises(CannotRun) as caught:
        build(Config(ends="open"))
    assert rows(refused(caught)) == [("planner.ends", "open", ["planner.ends=free"])]
    assert check(Config(ends="batch_split")) == []


def test_samples_that_do_not_divide():
    with pytest.raises(NoPlan) as caught:
        plan(dense((64, 128, 32), 12))
    found = caught.value.problem
    assert row(found) == ("mesh.tensor", 8, ["batch.size=16", "mesh.tensor=6"])
    assert "linear_0 (12 samples in a micro-batch, 64 x 128)" in found.message


def test_weights_that_do_not_fit():
    with pytest.raises(NoPlan) as caught:
        plan(dense((64, 128, 32)), memory_bytes=100_000)
    assert caught.value.problem.key == "cluster.memory_gb"
    assert "97.7 KiB" in caught.value.problem.message
