"""Data parallelism, Megatron-LM and SUMMA by their closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.core.cluster import Cluster, Link
from harness.sbp.baselines import Made, cheapest, data_parallel, megatron, meshes, summa
from harness.sbp.collective_costs import Collectives
from harness.sbp.device_grid import Grid
from harness.sbp.matmul_chain import Attention, Chain, Matmul, Residual
from harness.sbp.memory_limit import TooLarge, held
from harness.sbp.route import Route
from harness.sbp.shortest_path import Infeasible, Search
from harness.sbp.strategy_costs import INFINITE, Costs, Rules
from tests.harness.sbp.volumes import sent

BETA, SAMPLES, TOKENS, HIDDEN = 1e-10, 64, 128, 512
ELEMENTS = SAMPLES * TOKENS * HIDDEN


def costs(nodes: int, micro_batches: int = 1, splits: str = "even", **rules) -> Costs:
    cluster = Cluster(nodes=nodes, node_port=Link(0.0, BETA))
    return Costs(Collectives(cluster, Grid(nodes, 1)), 4, micro_batches, Rules("mixed", splits, **rules))


def block(heads: int = 8) -> list[Residual]:
    return [
        Residual((
            Matmul("qkv", SAMPLES, HIDDEN, 3 * HIDDEN, ELEMENTS, 3 * ELEMENTS, 12 * HIDDEN**2),
            Attention(SAMPLES, heads, 3 * ELEMENTS),
            Matmul("projection", SAMPLES, HIDDEN, HIDDEN, ELEMENTS, ELEMENTS, 4 * HIDDEN**2),
        ), ELEMENTS),
        Residual((
            Matmul("up", SAMPLES, HIDDEN, 4 * HIDDEN, ELEMENTS, 4 * ELEMENTS, 16 * HIDDEN**2),
            Matmul("down", SAMPLES, 4 * HIDDEN, HIDDEN, 4 * ELEMENTS, ELEMENTS, 16 * HIDDEN**2),
        ), ELEMENTS),
    ]  # fmt: skip


def best_of(find, chain: Chain, found: Costs, *more, limit: float = INFINITE) -> Route:
    search = Search(chain, found, "free")
    return cheapest([Made.of(route, search) for route in find(chain, found, "free", *more)], limit)


def test_data_parallelism_sends_gradients_alone():
    found, chain = costs(8), Chain(tuple(block()), 4)
    weights = 4 * 12 * HIDDEN**2
    assert sent(best_of(data_parallel, chain, found), found) == {"all_reduce weights": 2 * 7 / 8 * weights}
    with pytest.raises(Infeasible, match="qkv"):
        data_parallel(chain, costs(128), "free")


def test_megatrons_all_reduces_of_a_block():
    """Two in the forward pass and two in the backward pass, of (n, tokens, hidden) among m devices."""
    found = costs(8, max_replicas=2)
    before = Matmul("before", SAMPLES, HIDDEN, HIDDEN, ELEMENTS, ELEMENTS, 0)
    route = best_of(megatron, Chain((before, *block()), 4), found)
    numbers = {name: found.grid.numbers(strategy) for name, strategy in route.strategies.items()}
    assert numbers == {
        "before": (2, 4, 1),
        "qkv": (2, 4, 1),
        "projection": (2, 1, 4),
        "up": (2, 4, 1),
        "down": (2, 1, 4),
    }
    all_reduce = 2 * 3 / 4 * ELEMENTS * 4 / 2
    sent_bytes = sent(route, found)
    activations = sum(size for kind, size in sent_bytes.items() if "weights" not in kind)
    assert activations == pytest.approx(4 * all_reduce)


def test_megatron_takes_the_best_mesh_and_in_one_dimension_all_devices():
    found, chain = costs(8), Chain(tuple(block()), 4)
    best = best_of(megatron, chain, found).seconds
    one = best_of(megatron, chain, found, meshes(found.grid, two=False))
    assert {found.grid.numbers(strategy) for strategy in one.strategies.values()} == {(1, 8, 1), (1, 1, 8)}
    assert best <= min(one.seconds, best_of(data_parallel, chain, found).seconds)
    assert Search(chain, found, "free").route().seconds <= best
    with pytest.raises(Infeasible):
        megatron(Chain(tuple(block(heads=3)), 4), found, "free", meshes(found.grid, two=False))


@pytest.mark.parametrize("call_s", [0.0, 1e-3])
def test_summa_receives_inputs_along_rows_and_weights_along_columns(call_s):
    """3 (|X| / rows + |W| / columns) for each micro-batch; a panel of either has three calls, and the model's input,
    which needs no gradient, two."""
    middle = Matmul("1", SAMPLES, 64, 32, SAMPLES * 64, SAMPLES * 32, 4 * 64 * 32)
    first = Matmul("0", SAMPLES, 0, 64, 0, SAMPLES * 64, 0)  # nothing is sent for it but empty panels
    meshes = [(1, 8), (2, 4), (4, 2), (8, 1)]
    inputs, weights, m = 4 * SAMPLES * 64, 4 * 64 * 32, 3
    found = costs(8, micro_batches=m)
    slow = replace(found.collectives, cluster=replace(found.collectives.cluster, collective_call_s=call_s))
    found = replace(found, collectives=slow)
    routes = {found.grid.numbers(one.strategies["1"]): one for one in summa(Chain((first, middle), 4), found, "free")}
    assert sorted(routes) == meshes
    for (rows, columns), route in routes.items():
        received = 3 * m * (inputs / rows * (columns > 1) + weights / columns * (rows > 1))
        calls = m * max(rows, columns) * (3 + 2) * ((columns > 1) + (rows > 1))
        assert route.seconds == pytest.approx(received * BETA + calls * call_s)


def test_summas_look_up_sums_what_is_found_along_rows():
    """Its weight has the layout of that of a head, which may be the same parameter and is then held once."""
    words, rows = 64, 4
    table = Matmul("table", SAMPLES, words, 32, SAMPLES, SAMPLES * 32, 4 * words * 32, look_up=True, tied="w")
    head = Matmul("head", SAMPLES, 32, words, SAMPLES * 32, SAMPLES * words, 4 * words * 32, tied="w")
    found, chain = replace(costs(8), state=4.0), Chain((table, head), 4)
    route = next(one for one in summa(chain, found, "free") if found.grid.numbers(one.strategies["head"]) == (rows, 2))
    moving, weight = 4 * SAMPLES * 32 / rows / 2, 4 * words * 32 / 2 * 3 / 4
    assert sent(route, found) == {
        "broadcast forward": 2 * weight + moving, "reduce forward": moving,
        "broadcast backward": weight + 2 * moving, "reduce backward": 2 * weight + moving,
    }  # fmt: skip
    assert held(route, Search(chain, found, "free")) == (4 * 4 * words * 32 + 4 * SAMPLES * 32) / 8
    with pytest.raises(Infeasible, match="no mesh of SUMMA's"):
        summa(chain, costs(4096), "free")


def test_summa_leaves_convolutions_data_parallel_and_heads_whole():
    conv = Matmul("conv", SAMPLES, 3, 64, SAMPLES * 3, SAMPLES * 64, 4 * 27 * 64, conv=True)
    dense = Matmul("dense", SAMPLES, 64, 64, SAMPLES * 64, SAMPLES * 64, 4 * 64**2)
    found = costs(8)
    route = summa(Chain((conv, dense), 4), found, "free")[1]
    assert [found.grid.numbers(one) for one in route.strategies.values()] == [(8, 1, 1), (2, 4)]
    assert sent(route, found)["all_to_all forward"] == 4 * SAMPLES * 64 / 8 * 3 / 4
    routes = summa(Chain(tuple(block(heads=2)), 4), found, "free")
    assert [found.grid.numbers(one.strategies["qkv"]) for one in routes] == [(4, 2), (8, 1)]


def test_megatron_leaves_convolutions_data_parallel():
    conv = Matmul("conv", SAMPLES, 3, 64, SAMPLES * 3, SAMPLES * 64, 4 * 27 * 64, conv=True)
    dense = [Matmul(str(k), SAMPLES, 64, 64, SAMPLES * 64, SAMPLES * 64, 4 * 64**2) for k in range(2)]
    found = costs(8)
    route = best_of(megatron, Chain((conv, *dense), 4), found, meshes(found.grid, two=False))
    assert [found.grid.numbers(s) for s in route.strategies.values()] == [(8, 1, 1), (1, 8, 1), (1, 1, 8)]


def test_megatron_splits_weights_inside_of_nodes():
    cluster = Cluster(nodes=2, devices_per_node=4, intra=Link(0.0, BETA / 10), node_port=Link(0.0, BETA))
    found = Costs(Collectives(cluster, Grid(2, 4)), 4, 1, Rules())
    route = best_of(megatron, Chain(tuple(block()), 4), found)
    degrees = [found.grid.parts(degree) for s in route.strategies.values() for degree in (s.p1, s.p2)]
    assert all(nodes == 1 for nodes, _ in degrees)


def test_a_mesh_that_is_bound_to_nodes_splits_weights_among_all_devices_of_each():
    """AutoDDL, Sec. 5: intermediate results inside of nodes, weights across nodes."""
    grid = Grid(2, 4)
    assert [grid.parts(model) for model in meshes(grid)] == [(1, 1), (1, 2), (1, 4)]
    assert [grid.parts(model) for model in meshes(grid, whole_nodes=True)] == [(1, 4)]
    alone = Grid(8, 1)
    assert meshes(alone, whole_nodes=True) == meshes(alone), "nodes of one device have no inside"


def test_convolutions_can_be_kept_data_parallel():
    conv = Matmul("conv", SAMPLES, 64, 64, SAMPLES * 64, SAMPLES * 64, 4 * 9 * 64**2, conv=True)
    free, whole = costs(8), costs(8, whole_convolutions=True)
    assert [whole.grid.numbers(strategy) for strategy in whole.strategies(conv)] == [(8, 1, 1)]
    assert len(free.strategies(conv)) > 1
    linear = replace(conv, conv=False)
    assert whole.strategies(linear) == free.strategies(linear)


def test_baselines_keep_within_a_limit_of_bytes():
    found, chain = costs(8), Chain(tuple(block()), 4)
    search = Search(chain, found, "free")
    whole = held(best_of(data_parallel, chain, found), search)
    with pytest.raises(TooLarge) as error:
        best_of(data_parallel, chain, found, limit=whole - 1)
    assert error.value.least == whole
    best = best_of(megatron, chain, found)
    tight = best_of(megatron, chain, found, limit=held(best, search) - 1)
    assert held(tight, search) < held(best, search)
    assert tight.seconds >= best.seconds
    with pytest.raises(TooLarge) as error:
        best_of(megatron, chain, found, limit=1)
    least = error.value.least
    assert held(best_of(megatron, chain, found, limit=least), search) == least <= held(tight, search)
