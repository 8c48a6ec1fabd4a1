"""A route as a plan: what is sent, by matmul and stage, and what a device has."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core.cluster import Cluster, Device, Link
from harness.core.memory_model import NAMED
from harness.core.model_profile import ModelProfile
from harness.core.plan import Mesh, Plan, Stage
from harness.sbp.collective_costs import Collectives, grid_from_cluster
from harness.sbp.device_grid import Grid
from harness.sbp.matmul_chain import chain_from_profile
from harness.sbp.route_to_plan import (
    device_share,
    grid_from_plan,
    layer_index,
    matmul_figures,
    sent_by_matmul,
    with_exchanges,
    with_route,
)
from harness.sbp.shortest_path import Move, Route, Search, Step
from harness.sbp.strategy_costs import Costs, Rules
from harness.simulator.layer_times import analytic
from tests.harness.sbp.nets import dense, transformer
from tests.harness.sbp.volumes import sent
from tests.tiers import examples

CLUSTER = Cluster(nodes=4, devices_per_node=2, intra=Link(1e-6, 1e-11), node_port=Link(1e-5, 1e-10))
NETS = {"dense": dense((64, 128, 32, 16)), "transformer": transformer()}


def costs(profile: ModelProfile, devices: int = 8, micro_batches: int = 1, paths: str = "mixed") -> Costs:
    width = chain_from_profile(profile).element_bytes
    return Costs(Collectives(CLUSTER, grid_from_cluster(CLUSTER, devices)), width, micro_batches, Rules(paths), 4.0)


def planned(profile: ModelProfile, found: Costs, stages: tuple[Stage, ...] = (), ends: str = "free"):
    route = Search(chain_from_profile(profile), found, ends).route()
    devices = found.grid.size(found.grid.all)
    stages = stages or (Stage(0, len(profile.layers) - 1, 0),)
    plan = Plan(Mesh(pipeline=len(stages), tensor=devices), stages, found.micro_batches)
    return route, with_route(plan, route, found, profile, ends)


@settings(max_examples=examples(30), deadline=None)
@given(
    st.sampled_from(sorted(NETS)), st.sampled_from([1, 2, 4, 8]), st.integers(1, 3),
    st.sampled_from(["mixed", "paper"]), st.sampled_from(["free", "batch_split"]),
)  # fmt: skip
def test_traffic_adds_up_to_the_route(net, devices, micro_batches, paths, ends):
    profile = NETS[net]
    found = costs(profile, devices, micro_batches, paths)
    route, plan = planned(profile, found, ends=ends)
    times = {"forward": micro_batches, "backward": micro_batches, "weights": 1}
    traffic = [(one, times[one.phase]) for stage in plan.traffic for one in stage]
    assert sum(one.seconds * n for one, n in traffic) == pytest.approx(route.seconds, rel=1e-9)
    by_kind = {f"{one.algorithm} {one.phase}": one.bytes * n for one, n in traffic}
    assert by_kind == pytest.approx(sent(route, found))
    own = matmul_figures(route, found)
    assert sum(s for one in own.values() for s in one["seconds"].values()) == pytest.approx(route.seconds, rel=1e-9)
    assert sum(b for one in own.values() for b in one["bytes"].values()) == pytest.approx(sum(by_kind.values()))
    assert set(own) == set(plan.strategy)


def test_stages_have_the_traffic_of_their_own_products():
    profile = NETS["transformer"]
    found = costs(profile, 4)
    one, whole = planned(profile, found)
    _, halves = planned(profile, found, (Stage(0, 1, 0), Stage(2, 3, 1)))
    total = sum(t.bytes for t in whole.traffic[0])
    parts = [sum(t.bytes for t in stage) for stage in halves.traffic]
    head = one.steps[0]  # the embedding: each stage sums its own copy of the weight that the head has, too
    twice = (sum(sent(Route((step,), 0.0), found).values()) for step in (head._replace(reduced=True), head))
    assert sum(parts) == total + next(twice) - next(twice) > total
    own = matmul_figures(one, found)
    second = sum(sum(f["bytes"].values()) for name, f in own.items() if name.startswith(("block_1", "head")))
    assert parts[1] == second > 0


def test_a_move_belongs_to_the_product_after_it_and_one_past_a_branch_to_that_before():
    profile = dense((64, 128, 32))
    found = costs(profile, 8)
    first, second = chain_from_profile(profile).matmuls
    grid = found.grid
    strategy = grid.strategy((4, 2, 1, 1, 1, 1))
    here, there = found.places[0], found.places[-1]
    step, other = (Step(item, strategy, here, there) for item in (first, second))

    def owner(*steps) -> list[str]:
        sizes = sent_by_matmul(Route(steps, 0.0), found)
        return [name for name, own in sizes.items() if any(kind == "all_to_all" for kind, _ in own)]

    move = Move(64.0, there, here)
    assert owner(step, move, other) == ["linear_1"]
    assert owner(step, move._replace(past=True), other) == ["linear_0"]
    assert owner(step, other, move) == ["linear_1"]  # nothing comes after it
    assert owner(move, step, other) == ["linear_0"]


def test_layouts_say_where_tensors_lie():
    profile = dense((64, 128, 32))
    found = costs(profile, 8)
    grid = found.grid
    given_ = {"linear_0": grid.strategy((4, 2, 1, 1, 1, 1)), "linear_1": grid.strategy((4, 2, 1, 1, 1, 1))}
    route = Search(chain_from_profile(profile), found, "batch_split", given_).route()
    plan = with_route(Plan(Mesh(tensor=8), (Stage(0, 1, 0),)), route, found, profile, "batch_split")
    assert plan.strategy == {"linear_0": (4, 2, 1, 1, 1, 1), "linear_1": (4, 2, 1, 1, 1, 1)}
    assert plan.layouts == {"linear_0": ((4, 2), (4, 2)), "linear_1": ((4, 2), (4, 2)), "output": ((4, 2),)}
    assert grid_from_plan(plan) == grid
    free = with_route(plan, Search(chain_from_profile(profile), found, "free", given_).route(), found, profile, "free")
    assert free.layouts["linear_0"] == ((), (4, 2))
    assert "output" not in free.layouts
    paper = costs(profile, 8, paths="paper")
    assert planned(profile, paper)[1].layouts == {}, "a cost model says not where blocks lie"


@pytest.mark.parametrize("net", sorted(NETS))
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_the_devices_share_what_is_split_and_repeat_what_is_not(net, devices):
    profile = NETS[net]
    found = costs(profile, devices)
    _, plan = planned(profile, found)
    share = device_share(profile, plan, chain_from_profile(profile))
    for whole, own in zip(profile.layers, share.layers, strict=True):
        assert own.flops * devices == pytest.approx(whole.flops)
        assert own.output_bytes * devices == whole.output_bytes
    # of each weight as many copies as p0, all of it on the others
    grid, chain = found.grid, chain_from_profile(profile)
    copies = {i.name: grid.size(grid.strategy(plan.strategy[i.name]).p0) for i in chain.matmuls}
    wanted = sum(i.weight_bytes * copies[i.name] for i in chain.matmuls if not (i.tied and i.look_up))
    assert share.parameter_bytes(0, len(share.layers) - 1) * devices == pytest.approx(wanted, abs=8 * devices)


def test_shares_are_priced_again_where_small_products_are_less_efficient():
    """Megatron's pair on two devices: the first matmul is as deep as before, the second half as deep."""
    profile = dense((64, 128, 32), samples=8)
    plan = Plan(Mesh(tensor=2), (Stage(0, 1, 0),), strategy={"linear_0": (1, 2, 1), "linear_1": (1, 1, 2)})
    device = Device("D", peak_flops={"float32": 1.0}, memory_bandwidth=1e9, kernel_s=100.0, wave_elements=10)
    for waves, depths in ((10, (64, 64)), (0, None)):
        whole = analytic(profile, replace(device, wave_elements=waves))
        shares = device_share(whole, plan, chain_from_profile(whole)).layers
        for own, layer, deep in zip(shares, whole.layers, depths or (0, 0), strict=True):
            wanted = 100 + layer.flops / 2 + waves * deep if depths else layer.forward_s / 2
            assert (own.forward_s, own.backward_s) == pytest.approx((wanted, 2 * wanted))


def test_what_fewer_samples_take_too_is_not_shared():
    """But for reading weights: of split ones a device reads its own."""
    profile = dense((64, 128, 32), samples=8)
    weights = profile.layers[0].param_bytes
    layers = [replace(one, forward_s=4.0, backward_s=8.0, norm_bytes=64) for one in profile.layers]
    layers[0] = replace(layers[0], forward_fixed=0.25, backward_fixed=0.5, bytes_moved=4 * weights)
    profile = replace(profile, layers=tuple(layers))

    def shares(*numbers: int):
        plan = Plan(Mesh(tensor=2), (Stage(0, 1, 0),), strategy={"linear_0": numbers, "linear_1": (2, 1, 1)})
        return device_share(profile, plan, chain_from_profile(profile)).layers

    first, second = shares(2, 1, 1)
    assert (first.forward_s, first.backward_s) == (1 + 3 / 2, 4 + 4 / 2)
    assert (second.forward_s, second.backward_s) == (2, 4)
    assert (first.norm_bytes, second.norm_bytes) == (32, 32)
    split, _ = shares(1, 2, 1)
    elsewhere = weights - split.param_bytes
    assert elsewhere == pytest.approx(weights / 2, rel=0.02), "its bias is whole"
    read = 1 - elsewhere / (4 * weights)
    assert (split.forward_s, split.backward_s) == pytest.approx((1 * read + 3 / 2, 4 * read + 4 / 2))


def test_what_is_gathered_is_kept():
    profile = dense((64, 128, 32))
    found = costs(profile, 2)
    chain, saved = chain_from_profile(profile), profile.layers[1].saved_bytes
    for numbers, kept in (((2, 1, 1), saved // 2), ((1, 2, 1), saved), ((1, 1, 2), saved // 2)):
        strategy = {item.name: found.grid.strategy(numbers) for item in chain.matmuls}
        route = Search(chain, found, "free", strategy).route()
        plan = with_route(Plan(Mesh(tensor=2), (Stage(0, 1, 0),)), route, found, profile, "free")
        assert device_share(profile, plan, chain).layers[1].saved_bytes == kept


@pytest.mark.parametrize(
    ("numbers", "sixteenths"),
    [
        # input X, output Y, in sixteenths of an even share of X: X is 16, Y 8
        ((4, 1, 1), 0),
        ((1, 4, 1), 2 * 4 * 16 - 8),  # partial sums of X, twice, in addition to its share
        ((1, 1, 4), 3 * 4 * 8 - 16),  # Y gathered, three times, in addition to its share
        ((2, 2, 1), 2 * 2 * 16 - 8),
        ((2, 1, 2), 3 * 2 * 8 - 16),
        ((1, 2, 2), 2 * 2 * 16 - 8),
    ],
)
def test_backward_passes_work_with_what_is_gathered_and_with_partial_sums(numbers, sixteenths):
    """A matmul of 128 x 64 on 4 devices, 16 samples."""
    profile = dense((64, 128, 64), 16)
    found = costs(profile, 4)
    chain, grid = chain_from_profile(profile), Grid(1, 4)
    assert [item.input_elements for item in chain.matmuls] == [16 * 64, 16 * 128]
    strategy = {item.name: grid.numbers(grid.strategy(numbers)) for item in chain.matmuls}
    plan = Plan(Mesh(tensor=4), (Stage(0, 1, 0),), strategy=strategy)
    share = 16 * 128 * found.element_bytes // 4
    whole = device_share(profile, plan, chain)
    assert {layer.working_bytes for layer in whole.layers} == {0}
    assert with_exchanges(whole, plan, chain).layers[1].working_bytes == share * sixteenths // 16


@pytest.mark.parametrize(("numbers", "shares"), [((2, 1, 1), 0), ((1, 2, 1), 2), ((1, 1, 2), 0)])
def test_an_input_that_an_earlier_layer_keeps_stays_next_to_the_gathered_one(numbers, shares):
    """As after a ReLU, which keeps its output: its layer keeps a share of it, the matmul all of it."""
    profile = dense((64, 128, 32))
    layers = (profile.layers[0], replace(profile.layers[1], saved_bytes=0))
    profile = replace(profile, layers=layers)
    found = costs(profile, 2)
    chain = chain_from_profile(profile)
    strategy = {item.name: found.grid.strategy(numbers) for item in chain.matmuls}
    route = Search(chain, found, "free", strategy).route()
    plan = with_route(Plan(Mesh(tensor=2), (Stage(0, 1, 0),)), route, found, profile, "free")
    assert device_share(profile, plan, chain).layers[1].saved_bytes == shares * profile.layers[0].output_bytes // 2


def test_one_device_has_all_and_a_plan_without_strategies_shares_evenly():
    profile = NETS["dense"]
    chain = chain_from_profile(profile)
    stage = (Stage(0, len(profile.layers) - 1, 0),)
    assert device_share(profile, Plan(Mesh(), stage), chain) is profile
    even = device_share(profile, Plan(Mesh(tensor=4), stage), chain)
    last = len(profile.layers) - 1
    state = NAMED["adam_fp32"].state_bytes
    assert state(even, 0, last) * 4 == state(profile, 0, last)


def test_a_product_is_of_the_layer_with_the_longest_name():
    layers = ("block_1", "block_1.inner", "block_10")
    profile = ModelProfile(tuple(dense((4, 4)).layers[0].__class__(name) for name in layers))
    assert [layer_index(name, profile) for name in ("block_1.up", "block_1.inner.up", "block_10.up", "block_1")] == [
        0, 1, 2, 0,
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"no layer of the model has the matmul 'block_2\.up'"):
        layer_index("block_2.up", profile)
