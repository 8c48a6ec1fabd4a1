from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core.cluster import Cluster, Device, Link
from harness.core.memory_model import named
from harness.core.model_profile import LayerProfile, ModelProfile, Skip, Tied
from harness.core.plan import Stage
from harness.core.problem import NoPlan
from planners.periodic.bounds import sequential
from planners.periodic.layer_ticks import BUFFERS, chain_from_profile
from planners.periodic.reassign_devices import join_adjacent
from planners.periodic.stage_ranges import Spans
from tests.tiers import examples

LAYERS = (
    LayerProfile("a", 0.1, 0.2, param_bytes=10, output_bytes=120, saved_bytes=500),
    LayerProfile("b", 0.3, 0.1, param_bytes=20, output_bytes=240, saved_bytes=600, buffer_bytes=3),
    LayerProfile("c", 0.2, 0.4, param_bytes=30, output_bytes=50, saved_bytes=700),
)
PROFILE = ModelProfile(LAYERS, "three", 1, input_bytes=40)
CLUSTER = Cluster(devices_per_node=2, device=Device(memory_bytes=9000), intra=Link(0.01, 1e-3))


def test_the_papers_costs() -> None:
    chain = chain_from_profile(PROFILE, CLUSTER, named("madpipe_paper"))
    assert chain.state == (30, 63, 90), "3 W, and running statistics"
    assert chain.stored == (40, 120, 240), "inputs of layers"
    assert chain.buffers == (0, 240, 480, 0)
    assert chain.memory == 9000
    assert [chain.seconds(one) for one in chain.work] == pytest.approx([0.3, 0.4, 0.6], rel=1e-12)
    assert [chain.seconds(one) for one in chain.crossing] == pytest.approx([0, 0.26, 0.5, 0], rel=1e-12)
    assert chain.held(1, 2, 2) == 63 + 90 + 2 * (120 + 240) + 240
    assert chain.busy(1) == chain.crossing[1]
    assert chain_from_profile(PROFILE, CLUSTER, named("madpipe_paper"), "full").busy(1) == chain.sent[1]


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.sets(st.sampled_from("ABC")), min_size=2, max_size=6), st.data())
def test_state_on_a_device_is_what_the_harness_counts(names: list[set[str]], data: st.DataObject) -> None:
    """Tied weights once on each device, whichever of its stages have them."""
    sizes = {"A": 100, "B": 7, "C": 33}
    layers = tuple(
        LayerProfile(str(n), 0.1, 0.2, param_bytes=10 + n + sum(map(sizes.__getitem__, own)), output_bytes=5,
                     tied=tuple(Tied(name, sizes[name]) for name in sorted(own)))
        for n, own in enumerate(names)
    )  # fmt: skip
    profile, memory = ModelProfile(layers, "tied"), named(data.draw(st.sampled_from(("madpipe_paper", "adam_mixed"))))
    where = [data.draw(st.integers(0, 2)) for _ in layers]
    chain = chain_from_profile(profile, CLUSTER, replace(memory, activations="inputs"))
    timing = sequential(chain, join_adjacent([Stage(n, n, device) for n, device in enumerate(where)]))
    cuts = {d: sum(BUFFERS * 5 for a, b in pairwise(where) if a != b and d in (a, b)) for d in where}
    for device, fixed in timing.fixed().items():
        own = [n for n, other in enumerate(where) if other == device]
        assert fixed - cuts[device] == sum(memory.state_parts(profile, own).values())
    first, last = sorted((data.draw(st.integers(0, len(layers) - 1)), data.draw(st.integers(0, len(layers) - 1))))
    ends = chain.buffers[first] + chain.buffers[last + 1]
    assert chain.held(first, last, 0) - ends == memory.state_bytes(profile, first, last)
    assert Spans.from_chain(chain).held(0).tolist() == [
        chain.held(k, end - 1, 0) for k, end in combinations(range(chain.layers + 1), 2)
    ]


def test_all_that_autograd_saves() -> None:
    assert chain_from_profile(PROFILE, CLUSTER, named("adam_fp32")).stored == (500, 600, 700)
    chain = chain_from_profile(PROFILE, CLUSTER, named("adam_fp32"), micro_batches=2)
    assert chain.state == (40 + 2 * 40, 83, 120 + 50), "and all inputs, an output"
    assert chain.memory == 9000 - (120 + 240 + 20), "gradients of what layer b takes, makes and holds"


def test_equal_sums_of_seconds_are_equal_sums_of_ticks() -> None:
    """0.1 + 0.2 is not 0.3 in floats."""
    same = tuple(LayerProfile(str(i), one / 10, 0.0) for i, one in enumerate((1, 2, 3)))
    chain = chain_from_profile(ModelProfile(same), CLUSTER, named("madpipe_paper"))
    assert abs(chain.work[0] + chain.work[1] - chain.work[2]) <= 1
    assert chain.loads[-1] < 2**46


def test_a_skip_crosses_every_cut_that_it_jumps_over() -> None:
    skipping = ModelProfile(LAYERS, "skips", 1, input_bytes=40, skips=(Skip(0, 2, 1000),))
    assert chain_from_profile(skipping, CLUSTER, named("madpipe_paper")).buffers == (0, 2 * 1120, 2 * 1240, 0)


def test_the_slowest_link_counts() -> None:
    nodes = Cluster(nodes=2, devices_per_node=1, device=CLUSTER.device, intra=Link(), node_port=Link(0.0, 1e-2))
    chain = chain_from_profile(PROFILE, nodes, named("madpipe_paper"))
    assert chain.seconds(chain.sent[1]) == pytest.approx(1.2)


def test_a_profile_without_times_is_refused() -> None:
    counted = ModelProfile((LayerProfile("a", output_bytes=1), LayerProfile("b")))
    with pytest.raises(NoPlan, match="needs layer times"):
        chain_from_profile(counted, CLUSTER, named("madpipe_paper"))
