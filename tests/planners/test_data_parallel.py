from __future__ import annotations

import pytest

from harness.problem import NoPlan
from planners.data_parallel import Config, build, check
from planners.megatron import Config as Megatron
from planners.megatron import build as megatron
from tests.harness.sbp.nets import dense, transformer
from tests.planners.products_cases import ADAM, cluster, request


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
    with pytest.raises(ValueError, match=r"^planner.ends open   is none of free, batch_split   -> planner.ends=free$"):
        build(Config(ends="open"))
    check(Config(ends="batch_split"))


def test_samples_that_do_not_divide():
    with pytest.raises(NoPlan) as caught:
        plan(dense((64, 128, 32), 12))
    found = caught.value.problem
    assert (found.key, found.what) == ("mesh.tensor 8", "cannot split linear_0 (12 samples in a micro-batch, 64 x 128)")
    assert found.mend == "batch.size=16, or mesh.tensor=4"


def test_weights_that_do_not_fit():
    with pytest.raises(NoPlan) as caught:
        plan(dense((64, 128, 32)), memory_bytes=100_000)
    assert caught.value.problem.key == "a device's memory"
    assert "there are 97.7 KiB" in caught.value.problem.what
