"""The exact search against every way to lay a chain on the digits of a small grid."""

from __future__ import annotations

from functools import partial
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.core.cluster import Cluster, Link
from harness.sbp.collective_costs import Collectives
from harness.sbp.collective_volume import messages
from harness.sbp.device_grid import Grid, Strategy
from harness.sbp.matmul_chain import Attention, Chain, Matmul, Residual
from harness.sbp.route import Route
from harness.sbp.shortest_path import Infeasible, Search
from harness.sbp.strategy_costs import INFINITE, Costs, Place, Rules
from tests.harness.sbp.nets import clusters
from tests.support.quick import within_s
from tests.tiers import examples

INTRA, PORT = Link(1e-6, 1e-11), Link(1e-5, 1e-10)


def costs(nodes: int, local: int, paths: str, splits: str = "any", micro_batches: int = 1) -> Costs:
    cluster = Cluster(nodes=nodes, devices_per_node=local, intra=INTRA, node_port=PORT)
    return costs_on(cluster, paths, splits, micro_batches)


def costs_on(cluster: Cluster, paths: str, splits: str = "any", micro_batches: int = 1) -> Costs:
    grid = Grid(cluster.nodes, cluster.devices_per_node)
    return Costs(Collectives(cluster, grid), 4, micro_batches, Rules(paths, splits))


def dense(name: str, samples: int, inputs: int, outputs: int) -> Matmul:
    return Matmul(name, samples, inputs, outputs, samples * inputs, samples * outputs, 4 * inputs * outputs)


def ring(rounds: int, members: int, size: float) -> float:
    return rounds * ((members - 1) * PORT.alpha_s + (members - 1) / members * size * PORT.beta_s_per_byte)


def as_printed(layers: list[Matmul], strategies: list[tuple[int, int, int]], p: int, ends: str) -> float:
    """Section 4.3 word for word, forward and backward, on single-device nodes."""
    everything, last = (p, 1, 1), len(layers) - 1
    total = 0.0
    for number, (layer, (p0, p1, p2)) in enumerate(zip(layers, strategies, strict=True)):
        total += ring(2, p0, layer.weight_bytes / (p1 * p2))
        total += 2 * ring(1, p2, 4 * layer.output_elements / (p0 * p1))
        before = strategies[number - 1] if number else everything
        if number or ends == "batch_split":
            total += 2 * ring(1, p1, 4 * layer.input_elements / (p0 * p2))
            if before[0] != p0 and before[1] != p2:
                total += 2 * ring(1, p, 4 * layer.input_elements / p)
        if number == last and ends == "batch_split" and p0 != p and p1 != 1:
            total += 2 * ring(1, p, 4 * layer.output_elements / p)
    return total


widths = st.lists(st.integers(1, 64).map(lambda n: 8 * n), min_size=2, max_size=4)


@settings(max_examples=examples(40), deadline=None)
@given(widths, st.integers(1, 512), st.sampled_from([1, 2, 4, 6, 8, 12]), st.sampled_from(["free", "batch_split"]))
def test_the_papers_paths_are_as_printed(sizes, samples, p, ends):
    layers = [dense(str(k), samples, *pair) for k, pair in enumerate(pairwise(sizes))]
    found = costs(p, 1, "paper")
    every = [found.grid.numbers(strategy) for strategy in found.grid.strategies]
    route = Search(Chain(tuple(layers), 4), found, ends).route()
    best = min(as_printed(layers, list(chosen), p, ends) for chosen in product(every, repeat=len(layers)))
    assert route.seconds == pytest.approx(best, rel=1e-9)
    chosen = [found.grid.numbers(strategy) for strategy in route.strategies.values()]
    assert as_printed(layers, chosen, p, ends) == pytest.approx(best, rel=1e-9)


# -- digits: each one by itself is in i0, i1 or i2 of a matmul, and splits rows or columns between matmuls ----------


def by_digits(items: list, found: Costs, ends: str) -> float:
    """The least over all assignments of single digits, with residual branches that end where they began."""
    grid = found.grid
    digits = [(number, kind) for number, kind in enumerate(grid.kinds) for _ in range(kind.count)]

    def degree(taken) -> tuple[int, ...]:
        return tuple(sum(1 for d in taken if digits[d][0] == number) for number in range(len(grid.kinds)))

    places = [frozenset(d for d in range(len(digits)) if mask >> d & 1) for mask in range(1 << len(digits))]
    everywhere = frozenset(range(len(digits)))

    def move(elements: float, one: frozenset, other: frozenset) -> float:
        size = elements * found.element_bytes / grid.size(grid.all)
        return 2 * found.micro_batches * found.collectives.seconds("all_to_all", degree(one ^ other), size)

    def through(item, at: dict[frozenset, float], free: bool) -> dict[frozenset, float]:
        if isinstance(item, Residual):
            ends_at: dict[frozenset, float] = {}
            for begin, cost in at.items():
                inside = {begin: cost}
                for number, inner in enumerate(item.items):
                    inside = through(
                        inner, moved(inner.input_elements, inside, free and not number), free and not number
                    )
                for place, total in inside.items():
                    ends_at[place] = min(ends_at.get(place, 1e99), total + move(item.elements, begin, place))
            return ends_at
        if isinstance(item, Attention):

            def heads(place):
                return item.heads % (grid.size(grid.all) // grid.size(degree(place))) == 0

            return {place: cost for place, cost in at.items() if heads(place)}
        out: dict[frozenset, float] = {}
        for roles in product(range(3), repeat=len(digits)):
            i0, i1, i2 = (frozenset(d for d, role in enumerate(roles) if role == k) for k in range(3))
            cost = found.matmul_seconds(item, Strategy(degree(i0), degree(i1), degree(i2)), free)
            came = min((at[p] for p in at if i0 <= p and not (p & i2)), default=None)
            if came is None:
                continue
            for place in places:
                if i0 <= place and not (place & i1):
                    out[place] = min(out.get(place, 1e99), came + cost)
        return out

    def moved(elements: float, at: dict[frozenset, float], free: bool) -> dict[frozenset, float]:
        if free:
            return at
        return {p: min(cost + move(elements, one, p) for one, cost in at.items()) for p in places}

    at = dict.fromkeys(places, 0.0) if ends == "free" else {everywhere: 0.0}
    for number, item in enumerate(items):
        elements = item.elements if isinstance(item, Residual) else item.input_elements
        free = number == 0 and ends == "free"
        at = through(item, moved(elements, at, free), free)
    if ends == "free":
        return min(at.values())
    return min(cost + move(items[-1].output_elements, place, everywhere) for place, cost in at.items())


small = clusters().filter(lambda cluster: cluster.devices <= 12)


@settings(max_examples=examples(15), deadline=None)
@given(widths, st.integers(1, 512), small, st.sampled_from(["free", "batch_split"]))
def test_mixed_paths_are_the_best_of_all_digits(sizes, samples, cluster, ends):
    layers = [dense(str(k), samples, *pair) for k, pair in enumerate(pairwise(sizes))]
    mixed = costs_on(cluster, "mixed")
    route = Search(Chain(tuple(layers), 4), mixed, ends).route()
    assert route.seconds == pytest.approx(by_digits(layers, mixed, ends), rel=1e-9)


@settings(max_examples=examples(40), deadline=None)
@given(clusters(), st.floats(1, 1e9))
def test_no_move_is_dearer_than_the_papers(cluster, elements):
    mixed, paper = costs_on(cluster, "mixed"), costs_on(cluster, "paper")
    there = [mixed.places.index(Place(place.rows)) for place in paper.places]
    assert (mixed.moving(elements)[np.ix_(there, there)] <= paper.moving(elements) * (1 + 1e-12)).all()


@settings(max_examples=examples(60), deadline=None)
@given(
    clusters(), st.lists(st.sampled_from([48, 96, 768, 12288]), min_size=2, max_size=5), st.sampled_from([1, 96, 960]),
    st.sampled_from(["dense", "blocks", "tied"]), st.sampled_from(["even", "any"]),
    st.sampled_from(["free", "batch_split"]), st.sampled_from([1, 3]), st.booleans(),
)  # fmt: skip
@example(
    Cluster(nodes=4, devices_per_node=4, intra=Link(1e-5, 1e-12), node_port=Link(1e-5, 1e-9)),
    [12288, 12288, 768], 192, "dense", "even", "batch_split", 1, False,
)  # fmt: skip
def test_mixed_paths_are_never_worse_than_the_papers(cluster, sizes, samples, kind, splits, ends, count, repeat):
    items = [dense(str(k), samples, *pair) for k, pair in enumerate(pairwise(sizes))]
    if kind != "dense":
        items = transformer(samples, 8, sizes[0], 12, len(sizes) - 1)
    if kind == "tied":
        items = [embedding(samples, 8, sizes[0]), *items, head(samples, 8, sizes[0])]
    chain = Chain(tuple(items), 4)
    paper = cheapest(Search(chain, costs_on(cluster, "paper", splits, count), ends, repeat=repeat))
    mixed = cheapest(Search(chain, costs_on(cluster, "mixed", splits, count), ends, repeat=repeat))
    assert mixed <= paper * (1 + 1e-12)


def cheapest(search: Search) -> float:
    """Seconds of its route; infinite where there is none."""
    try:
        return search.route().seconds
    except Infeasible:
        return INFINITE


def transformer(samples: int, tokens: int, hidden: int, heads: int, layers: int = 1) -> list:
    elements = samples * tokens * hidden
    found = []
    for k in range(layers):
        found += [
            Residual((
                Matmul(f"{k}.qkv", samples, hidden, 3 * hidden, elements, 3 * elements, 12 * hidden**2),
                Attention(samples, heads, 3 * elements),
                Matmul(f"{k}.projection", samples, hidden, hidden, elements, elements, 4 * hidden**2),
            ), elements),
            Residual((
                Matmul(f"{k}.up", samples, hidden, 4 * hidden, elements, 4 * elements, 16 * hidden**2),
                Matmul(f"{k}.down", samples, 4 * hidden, hidden, 4 * elements, elements, 16 * hidden**2),
            ), elements),
        ]  # fmt: skip
    return found


def embedding(samples: int, tokens: int, hidden: int, words: int = 480) -> Matmul:
    elements = samples * tokens * hidden
    return Matmul("embedding", samples, words, hidden, samples * tokens, elements, 4 * words * hidden, True, tied="e")


def head(samples: int, tokens: int, hidden: int, words: int = 480) -> Matmul:
    """With the embedding's weight."""
    elements = samples * tokens * hidden
    return Matmul("head", samples, hidden, words, elements, samples * tokens * words, 4 * words * hidden, tied="e")


@pytest.mark.parametrize("shape", [(1, 4), (2, 2), (8, 1), (2, 4)])
@pytest.mark.parametrize("ends", ["free", "batch_split"])
@pytest.mark.parametrize(("samples", "tokens", "hidden"), [(8, 32, 64), (64, 4, 512), (16, 512, 32)])
def test_residual_branches_are_the_best_of_all_digits(shape, ends, samples, tokens, hidden):
    items = [dense("first", samples, hidden, hidden), *transformer(samples, tokens, hidden, heads=8)]
    items[0] = Matmul(
        "first", samples, hidden, hidden, samples * tokens * hidden, samples * tokens * hidden, 4 * hidden**2
    )
    items.append(Matmul("last", samples, hidden, 100, samples * tokens * hidden, samples * tokens * 100, 400 * hidden))
    found = costs(*shape, "mixed")
    route = Search(Chain(tuple(items), 4), found, ends).route()
    assert route.seconds == pytest.approx(by_digits(items, found, ends), rel=1e-9)


@pytest.mark.parametrize("paths", ["mixed", "paper"])
@pytest.mark.parametrize("ends", ["free", "batch_split"])
@pytest.mark.parametrize("shape", [(16, 1), (2, 4)])
def test_the_seconds_of_a_route_are_those_of_its_messages(paths, ends, shape):
    found = costs(*shape, paths, micro_batches=3)
    inner = transformer(64, 32, 64, 8, 2)
    for items in (inner, [embedding(64, 32, 64), *inner, head(64, 32, 64)]):
        route = Search(Chain(tuple(items), 4), found, ends).route()
        seconds_of_messages = [
            m.times * found.collectives.seconds(m.name, m.degree, m.size) for m in messages(route, found)
        ]
        assert sum(seconds_of_messages) == pytest.approx(route.seconds, rel=1e-9)


def test_given_strategies_are_kept_and_their_cost_is_the_routes():
    layers = tuple(transformer(16, 32, 64, 8, layers=2))
    found = costs(2, 4, "mixed")
    route = Search(Chain(layers, 4), found, "free").route()
    again = Search(Chain(layers, 4), found, "free", route.strategies).route()
    assert (again.strategies, again.seconds) == (route.strategies, pytest.approx(route.seconds, rel=1e-12))


def test_what_cannot_be_split_evenly_is_named():
    layers = (dense("one", 8, 8, 8), dense("odd", 7, 9, 5))
    with pytest.raises(Infeasible, match="odd"):
        Search(Chain(layers, 4), costs(1, 16, "mixed", "even"), "free").route()


def test_accumulating_gradients_sends_them_once():
    layers = (dense("0", 64, 64, 64),)
    given = {"0": Grid(8, 1).strategy((8, 1, 1))}
    one, four = (Search(Chain(layers, 4), costs(8, 1, "mixed", micro_batches=m), "free", given).route() for m in (1, 4))
    assert one.seconds == four.seconds == ring(2, 8, 4 * 64 * 64)


def planned(chain: Chain, priced: Costs) -> Route:
    return Search(chain, priced, "free").route()


def test_planning_at_scale_is_quick():
    ends = embedding(1024, 1024, 8192, 50257), head(1024, 1024, 8192, 50257)
    gpt = Chain((ends[0], *transformer(1024, 1024, 8192, 64, layers=100), ends[1]), 4)
    for shape, limit_s in (((1, 16384), 1.0), ((128, 8), 5.0)):
        priced = costs(*shape, "mixed")
        within_s(limit_s, partial(planned, gpt, priced))
