"""The search under a limit of bytes against every assignment of strategies."""

from __future__ import annotations

from functools import partial
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core.cluster import Cluster, Link
from harness.sbp.collective_costs import Collectives
from harness.sbp.device_grid import Grid
from harness.sbp.matmul_chain import Attention, Chain, Matmul, Residual
from harness.sbp.memory_limit import TooLarge, cheapest_within, held
from harness.sbp.route import Route
from harness.sbp.shortest_path import Infeasible, Search
from harness.sbp.strategy_costs import Costs, Rules
from tests.harness.sbp.brute_force import Every, least
from tests.support.quick import within_s
from tests.tiers import examples


def search(items: list, p: int, paths: str, ends: str) -> Search:
    cluster = Cluster(nodes=p, node_port=Link(1e-6, 1e-10))
    return Search(Chain(tuple(items), 4), Costs(Collectives(cluster, Grid(p, 1)), 4, 2, Rules(paths, "any"), 4.0), ends)


def every_route(one: Search) -> list[tuple[float, float]]:
    """(bytes, seconds) of each assignment of strategies."""
    found = []
    for chosen in product(one.costs.grid.strategies, repeat=len(one.matmuls)):
        given_ = {item.name: strategy for item, strategy in zip(one.matmuls, chosen, strict=True)}
        try:
            route = Search(one.chain, one.costs, one.ends, given_).route()
        except Infeasible:
            continue
        found.append((held(route, one), route.seconds))
    return found


def check(one: Search, *shares: float) -> None:
    every = every_route(one)
    fewest, most = min(size for size, _ in every), max(size for size, _ in every)
    for share in shares:
        limit = fewest + share * (most - fewest)
        route = cheapest_within(one, limit)
        assert route.seconds == pytest.approx(least(every, limit), rel=1e-9)
        assert held(route, one) <= limit * (1 + 1e-9)


@settings(max_examples=examples(12), deadline=None)
@given(
    st.lists(st.integers(1, 64).map(lambda n: 8 * n), min_size=3, max_size=4), st.integers(1, 512),
    st.sampled_from(["mixed", "paper"]), st.sampled_from(["free", "batch_split"]), st.floats(0.0, 1.0),
)  # fmt: skip
def test_dense_layers_within_a_limit(sizes, samples, paths, ends, share):
    layers = [
        Matmul(str(k), samples, a, b, samples * a, samples * b, 4 * a * b) for k, (a, b) in enumerate(pairwise(sizes))
    ]
    check(search(layers, 6, paths, ends), share)


@pytest.mark.parametrize("samples", [4, 64])
def test_a_transformer_with_one_weight_at_both_ends_within_a_limit(samples):
    tokens, hidden, words = 16, 64, 300
    rows, elements = samples * tokens, samples * tokens * hidden
    items = [
        Matmul("embedding", samples, words, hidden, rows, elements, 4 * words * hidden, look_up=True, tied="e"),
        Residual((
            Matmul("qkv", samples, hidden, 3 * hidden, elements, 3 * elements, 12 * hidden**2),
            Attention(samples, 8, 3 * elements),
            Matmul("projection", samples, hidden, hidden, elements, elements, 4 * hidden**2),
        ), elements),
        Matmul("head", samples, hidden, words, elements, rows * words, 4 * words * hidden, tied="e"),
    ]  # fmt: skip
    check(search(items, 4, "mixed", "free"), 0.0, 0.02, 0.1, 0.4, 1.0)


def blocks(count: int, samples: int, hidden: int, tokens: int = 16) -> list[Residual]:
    """Of a transformer: attention of 96 heads and two dense layers each."""
    elements = samples * tokens * hidden
    return [
        item
        for k in range(count)
        for item in (
            Residual((
                Matmul(f"{k}.qkv", samples, hidden, 3 * hidden, elements, 3 * elements, 12 * hidden**2),
                Attention(samples, 96, 3 * elements),
                Matmul(f"{k}.projection", samples, hidden, hidden, elements, elements, 4 * hidden**2),
            ), elements),
            Residual((
                Matmul(f"{k}.up", samples, hidden, 4 * hidden, elements, 4 * elements, 16 * hidden**2),
                Matmul(f"{k}.down", samples, 4 * hidden, hidden, 4 * elements, elements, 16 * hidden**2),
            ), elements),
        )
    ]  # fmt: skip


def tied(inner: list, samples: int, hidden: int, words: int, tokens: int = 16) -> list:
    rows, elements = samples * tokens, samples * tokens * hidden
    return [
        Matmul("embedding", samples, words, hidden, rows, elements, 4 * words * hidden, look_up=True, tied="e"),
        *inner,
        Matmul("head", samples, hidden, words, elements, rows * words, 4 * words * hidden, tied="e"),
    ]


def check_all(one: Search, shares: tuple[float, ...]) -> None:
    """Against every route, at limits between the least bytes and those of the cheapest route."""
    every = Every(one.chain, one.costs, one.ends).routes()
    fewest, most = min(size for size, _ in every), held(one.route(), one)
    for share in shares:
        limit = fewest + share * (most - fewest)
        route = cheapest_within(one, limit)
        assert route.seconds == pytest.approx(least(every, limit), rel=1e-9)
        assert held(route, one) <= limit * (1 + 1e-9)
        again = Search(one.chain, one.costs, one.ends, route.strategies).route()
        assert again.seconds <= route.seconds * (1 + 1e-9)


@settings(max_examples=examples(40), deadline=None)
@given(
    st.integers(0, 7).map(lambda n: 1 << n), st.sampled_from([8, 64, 256]), st.integers(1, 2), st.booleans(),
    st.sampled_from([2, 3, 4]), st.sampled_from(["mixed", "paper"]), st.sampled_from(["free", "batch_split"]),
    st.floats(0.0, 1.0),
)  # fmt: skip
def test_residual_branches_within_a_limit_with_and_without_a_tie(samples, hidden, count, tie, p, paths, ends, share):
    inner: list = blocks(count, samples, hidden)
    check_all(search(tied(inner, samples, hidden, 300) if tie else inner, p, paths, ends), (share,))


@pytest.mark.parametrize("p", [6, 8])
@pytest.mark.parametrize("ends", ["free", "batch_split"])
def test_a_deep_chain_within_a_limit(p, ends):
    """Of equal and of different layers, so that many routes are close to each other."""
    sizes = [512, 512, 512, 512, 768, 512, 768, 512, 512, 1024, 512]
    layers = [Matmul(str(k), 96, a, b, 96 * a, 96 * b, 4 * a * b) for k, (a, b) in enumerate(pairwise(sizes))]
    check_all(search(layers, p, "mixed", ends), (0.0, 0.03, 0.1, 0.25, 0.5, 0.75, 0.97))


def fitting(chain: Chain, costs: Costs, limit: float) -> Route:
    return cheapest_within(Search(chain, costs), limit)


@pytest.mark.usefixtures("computation")
def test_a_limit_at_scale_is_quick():
    """A hundred layers of a transformer on 16,384 devices and on 128 nodes of 8; four dense layers on 4,096."""
    sizes = [32768, 16384, 4096, 2048, 512]
    dense = [Matmul(str(k), 8192, a, b, 8192 * a, 8192 * b, 4 * a * b) for k, (a, b) in enumerate(pairwise(sizes))]
    gpt = tied(blocks(100, 1024, 8192, 1024), 1024, 8192, 50257, 1024)
    for items, nodes, local, limit_s in ((dense, 4096, 1, 0.3), (gpt, 16384, 1, 5.0), (gpt, 128, 8, 5.0)):
        cluster = Cluster(nodes=nodes, devices_per_node=local, intra=Link(1e-6, 1e-11), node_port=Link(1e-5, 1e-10))
        costs = Costs(Collectives(cluster, Grid(nodes, local)), 4, 1, Rules("mixed", "any"))
        one = Search(Chain(tuple(items), 4), costs)
        small, most = held(one.priced(1.0, scale=0.0).route(), one), held(one.route(), one)
        limit = (small + most) / 2
        route = within_s(limit_s, partial(fitting, Chain(tuple(items), 4), costs, limit))
        assert held(route, one) <= limit * (1 + 1e-9)


def test_too_little_memory_says_the_least_need():
    layers = [Matmul("0", 8, 64, 64, 512, 512, 16384), Matmul("1", 8, 64, 64, 512, 512, 16384)]
    one = search(layers, 4, "mixed", "free")
    least = min(size for size, _ in every_route(one))
    with pytest.raises(TooLarge) as error:
        cheapest_within(one, 0.9 * least)
    assert error.value.least == pytest.approx(least)
