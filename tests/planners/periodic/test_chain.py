from __future__ import annotations

import pytest

from harness.cluster import Cluster, Device, Link
from harness.memory import named
from harness.problem import NoPlan
from harness.profile import LayerProfile, ModelProfile, Skip
from planners.periodic.chain import chain_of

LAYERS = (
    LayerProfile("a", 0.1, 0.2, param_bytes=10, output_bytes=120, saved_bytes=500),
    LayerProfile("b", 0.3, 0.1, param_bytes=20, output_bytes=240, saved_bytes=600, buffer_bytes=3),
    LayerProfile("c", 0.2, 0.4, param_bytes=30, output_bytes=50, saved_bytes=700),
)
PROFILE = ModelProfile(LAYERS, "three", 1, input_bytes=40)
CLUSTER = Cluster(devices_per_node=2, device=Device(memory_bytes=9000), intra=Link(0.01, 1e-3))


def test_the_papers_costs() -> None:
    chain = chain_of(PROFILE, CLUSTER, named("madpipe_paper"))
    assert chain.state == (30, 63, 90), "3 W, and running statistics"
    assert chain.stored == (40, 120, 240), "inputs of layers"
    assert chain.buffers == (0, 240, 480, 0)
    assert chain.memory == 9000
    assert [chain.seconds(one) for one in chain.work] == pytest.approx([0.3, 0.4, 0.6], rel=1e-12)
    assert [chain.seconds(one) for one in chain.crossing] == pytest.approx([0, 0.26, 0.5, 0], rel=1e-12)
    assert chain.held(1, 2, 2) == 63 + 90 + 2 * (120 + 240) + 240
    assert chain.busy(1) == chain.crossing[1]
    assert chain_of(PROFILE, CLUSTER, named("madpipe_paper"), "full").busy(1) == chain.sent[1]


def test_all_that_autograd_saves() -> None:
    assert chain_of(PROFILE, CLUSTER, named("adam_fp32")).stored == (500, 600, 700)
    chain = chain_of(PROFILE, CLUSTER, named("adam_fp32"), micro_batches=2)
    assert chain.state == (40 + 2 * 40, 83, 120 + 50), "and all inputs, an output"
    assert chain.memory == 9000 - (120 + 240 + 20), "gradients of what layer b takes, makes and holds"


def test_equal_sums_of_seconds_are_equal_sums_of_ticks() -> None:
    """0.1 + 0.2 is not 0.3 in floats."""
    same = tuple(LayerProfile(str(i), one / 10, 0.0) for i, one in enumerate((1, 2, 3)))
    chain = chain_of(ModelProfile(same), CLUSTER, named("madpipe_paper"))
    assert abs(chain.work[0] + chain.work[1] - chain.work[2]) <= 1
    assert chain.loads[-1] < 2**46


def test_a_skip_crosses_every_cut_that_it_jumps_over() -> None:
    skipping = ModelProfile(LAYERS, "skips", 1, input_bytes=40, skips=(Skip(0, 2, 1000),))
    assert chain_of(skipping, CLUSTER, named("madpipe_paper")).buffers == (0, 2 * 1120, 2 * 1240, 0)


def test_the_slowest_link_counts() -> None:
    nodes = Cluster(nodes=2, devices_per_node=1, device=CLUSTER.device, intra=Link(), node_port=Link(0.0, 1e-2))
    chain = chain_of(PROFILE, nodes, named("madpipe_paper"))
    assert chain.seconds(chain.sent[1]) == pytest.approx(1.2)


def test_a_profile_without_times_is_refused() -> None:
    counted = ModelProfile((LayerProfile("a", output_bytes=1), LayerProfile("b")))
    with pytest.raises(NoPlan, match="needs layer times"):
        chain_of(counted, CLUSTER, named("madpipe_paper"))
