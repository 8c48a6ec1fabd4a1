"""The search under a limit of bytes against every assignment of strategies."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cluster import Cluster, Link
from harness.sbp.chain import Attention, Chain, Matmul, Residual
from harness.sbp.collectives import Collectives
from harness.sbp.costs import Costs, Rules
from harness.sbp.grid import Grid
from harness.sbp.limit import TooLarge, held, within
from harness.sbp.optimum import Infeasible, Search


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


def check(one: Search, share: float) -> None:
    every = every_route(one)
    least, most = min(size for size, _ in every), max(size for size, _ in every)
    limit = least + share * (most - least)
    best = min(seconds for size, seconds in every if size <= limit * (1 + 1e-12))
    route = within(one, limit)
    assert route.seconds == pytest.approx(best, rel=1e-9)
    assert held(route, one) <= limit * (1 + 1e-9)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 64).map(lambda n: 8 * n), min_size=3, max_size=4), st.integers(1, 512),
    st.sampled_from(["mixed", "paper"]), st.sampled_from(["free", "batch_split"]), st.floats(0.0, 1.0),
)  # fmt: skip
def test_dense_layers_within_a_limit(sizes, samples, paths, ends, share):
    layers = [
        Matmul(str(k), samples, a, b, samples * a, samples * b, 4 * a * b) for k, (a, b) in enumerate(pairwise(sizes))
    ]
    check(search(layers, 6, paths, ends), share)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.1, 0.4, 1.0])
@pytest.mark.parametrize("samples", [4, 64])
def test_a_transformer_with_one_weight_at_both_ends_within_a_limit(share, samples):
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
    check(search(items, 4, "mixed", "free"), share)


def test_too_little_memory_says_the_least_need():
    layers = [Matmul("0", 8, 64, 64, 512, 512, 16384), Matmul("1", 8, 64, 64, 512, 512, 16384)]
    one = search(layers, 4, "mixed", "free")
    least = min(size for size, _ in every_route(one))
    with pytest.raises(TooLarge) as error:
        within(one, 0.9 * least)
    assert error.value.least == pytest.approx(least)
