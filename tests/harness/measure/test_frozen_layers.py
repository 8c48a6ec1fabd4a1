"""Parameters that are not trained, in profiles and in what follows from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from harness.core.cluster import Cluster, Device
from harness.core.memory_model import named
from harness.core.model_profile import LayerProfile, ModelProfile, Tied
from harness.core.plan import Plan
from harness.core.products import Product
from harness.interfaces import BatchShape, PlanRequest
from harness.measure.count_model import count
from harness.sbp.matmul_chain import chain_from_profile
from harness.simulator.layer_times import analytic
from harness.simulator.op_durations import TaskCosts
from planners import stage_costs
from planners.deepspeed import Config, DeepSpeed
from tests.engines import networks
from tests.engines.networks import Network
from tests.engines.test_frozen_weights import net

WEIGHT, BIAS = 96 * 96 * 4, 96 * 4


def test_a_backbone_has_no_backward_pass() -> None:
    """The first layer that is trained computes the gradients of its weights, and of one input inside."""
    layers = count(net("half"), 8, "float32").layers
    assert [layer.frozen_bytes for layer in layers] == [2 * (WEIGHT + BIAS)] * 3 + [0] * 3
    assert [layer.frozen_weights for layer in layers] == [4] * 3 + [0] * 3
    assert [layer.backward_matmuls for layer in layers] == [0.0] * 3 + [1.5, 2.0, 2.0]
    assert [layer.input_share for layer in layers] == [0.5] * 3 + [pytest.approx(1 / 3), 0.5, 0.5]
    assert [layer.saved_bytes > 0 for layer in layers] == [False] * 3 + [True] * 3


def test_adapters_compute_the_gradients_of_inputs_and_of_themselves() -> None:
    """Of the first layer those of the inputs of three products, of others those of all six."""
    first, *others = count(net("lora"), 8, "float32").layers
    large, small = WEIGHT / 4, 4 * 96
    whole = 2 * (large + 2 * small)
    assert {layer.frozen_bytes for layer in (first, *others)} == {2 * (WEIGHT + BIAS)}
    assert [layer.backward_matmuls for layer in others] == [pytest.approx((whole + 4 * small) / whole)] * 5
    assert first.backward_matmuls == pytest.approx((small + large + 2 * small + 4 * small) / whole)
    assert {layer.trained_bytes for layer in others} == {4 * 4 * small}


def test_without_frozen_parameters_nothing_is_counted_apart() -> None:
    usual = LayerProfile()
    for layer in count(net("none"), 8, "float32").layers:
        assert (layer.frozen_bytes, layer.frozen_weights) == (0, 0)
        assert (layer.backward_matmuls, layer.backward_others, layer.input_share) == (2.0, 2.0, usual.input_share)


def test_a_tied_weight_that_is_not_trained_counts_once() -> None:
    def layers() -> list[nn.Module]:
        table = nn.Linear(5, 5, bias=False).requires_grad_(False)
        return [table, nn.Linear(5, 5, bias=False), table]

    def rows(number: int) -> Tensor:
        return torch.randn(number, 5)

    profile = count(Network("tied", layers, rows, rows, networks._squares), 2, "float32")
    assert profile.layers[0].tied == (Tied("0.weight", 100, frozen=True),)
    assert (profile.parameter_bytes(), profile.trained_bytes()) == (200, 100)


def test_an_older_profile_has_none() -> None:
    written = ModelProfile((LayerProfile("a", param_bytes=8, tied=(Tied("w", 8),)),)).to_json()
    for key in ("frozen_bytes", "frozen_weights", "backward_matmuls", "backward_others"):
        del written["layers"][0][key]
    del written["layers"][0]["tied"][0]["frozen"]
    assert ModelProfile.from_json(written).trained_bytes() == 8
    with pytest.raises(ValueError, match="frozen_bytes of layer 'a' are 9"):
        LayerProfile("a", param_bytes=8, frozen_bytes=9)


DEVICE = Device("d", peak_flops={"float32": 1e3}, memory_bandwidth=1e3, kernel_s=1.0)


def test_analytic_times_follow() -> None:
    """A layer of two kernels, one of them a matmul: 1 s for each to begin, and 4 s and 2 s of work."""
    product = Product("w", in_=1, out=1, weight_bytes=4)
    layer = LayerProfile(
        "a", flops=4e3, bytes_moved=2e3, elementwise_bytes=2e3, kernels=2, products=(product,),
        backward_matmuls=1.0, backward_others=0.5,
    )  # fmt: skip
    usual = replace(layer, backward_matmuls=2.0, backward_others=2.0)
    found = analytic(ModelProfile((layer, usual)), DEVICE).layers
    assert [one.forward_s for one in found] == [8.0, 8.0]
    assert [one.backward_s for one in found] == [pytest.approx(1 * 1.5 + 4 * 1.0 + 2 * 0.5), 16.0]


HALF = LayerProfile("a", forward_s=1.0, param_bytes=1000, frozen_bytes=900, weights=10, frozen_weights=9)


def test_the_optimizer_steps_what_is_trained() -> None:
    profile, small = ModelProfile((HALF,)), ModelProfile((replace(HALF, param_bytes=100, frozen_bytes=0),))
    cluster, memory, plan = Cluster(device=DEVICE), named("adam_fp32"), Plan.contiguous([1], 1)
    seconds = [TaskCosts(plan, one, cluster, memory).seconds["step"] for one in (profile, small)]
    assert seconds[0] == seconds[1]
    assert profile.held(0, 0, trained=True)[1:3] == (1, 100)


def test_frozen_weights_are_not_all_reduced() -> None:
    """And nothing goes back through what comes before all that is trained."""
    matmuls = chain_from_profile(count(net("half"), 8, "float32")).matmuls
    assert [item.frozen for item in matmuls] == [True] * 6 + [False] * 6
    assert [item.cut for item in matmuls] == [True] * 7 + [False] * 5, (
        "nor has the first trained one's input a gradient"
    )
    product = Product("a", in_=4, out=4, weight_bytes=64, frozen=True)
    layers = [LayerProfile("a", products=(product,)), LayerProfile("a", products=(replace(product, frozen=False),))]
    assert [one.frozen for layer in layers for one in chain_from_profile(ModelProfile((layer,))).matmuls] == [
        True,
        False,
    ]


def test_planners_count_no_state_of_frozen_weights() -> None:
    tied = replace(HALF, param_bytes=40, frozen_bytes=40, weights=1, frozen_weights=1, tied=(Tied("w", 40, True),))
    profile, asked = ModelProfile((tied, HALF, tied)), PlanRequest(BatchShape(4, 4), 1)
    costs = stage_costs.by_memory(profile, named("adam_fp32"), asked).for_sizes([3])
    assert costs[0] == pytest.approx(named("adam_fp32").state_bytes(profile, 0, 2))
    full = replace(HALF, frozen_bytes=0)
    plan = DeepSpeed(Config()).plan(
        ModelProfile((HALF, HALF, full)), Cluster(), named("adam_fp32"), PlanRequest(BatchShape(4, 4), 2)
    )
    assert plan.balance == (2, 1) and plan.predicted["stage_cost"] == [200.0, 1000.0]
