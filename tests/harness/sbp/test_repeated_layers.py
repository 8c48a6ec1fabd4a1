"""Blocks that are repeated equal: the search against every route of which the blocks are equal."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core.cluster import Cluster, Link
from harness.sbp.collective_costs import Collectives
from harness.sbp.collective_volume import messages
from harness.sbp.device_grid import Grid
from harness.sbp.matmul_chain import Attention, Chain, Matmul, Residual
from harness.sbp.memory_limit import TooLarge, cheapest_within, held
from harness.sbp.repeated_layers import Repeated, fold_repeats
from harness.sbp.route import Move, Route, Step
from harness.sbp.shortest_path import Search
from harness.sbp.strategy_costs import Costs, Rules
from tests.harness.sbp.brute_force import Every, least
from tests.support.quick import within_s
from tests.tiers import examples


def costs(nodes: int, local: int, paths: str) -> Costs:
    cluster = Cluster(nodes=nodes, devices_per_node=local, intra=Link(1e-6, 1e-11), node_port=Link(1e-6, 1e-10))
    return Costs(Collectives(cluster, Grid(nodes, local)), 4, 2, Rules(paths, "any"), 4.0)


def dense(name: str, samples: int, inputs: int, outputs: int, heavy: int = 1) -> Matmul:
    return Matmul(name, samples, inputs, outputs, samples * inputs, samples * outputs, 4 * inputs * outputs * heavy)


# -- what is repeated -------------------------------------------------------------------------------------------------


def lettered(text: str) -> list[Matmul]:
    return [dense(letter, 8, 8, 8) for letter in text]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abc", "abc"),
        ("aab", "[a]2b"),
        ("abab", "[ab]2"),
        ("xababy", "x[ab]2y"),
        ("aaaa", "[a]4"),  # the shortest period
        ("xabababy", "x[ab]3y"),
        ("ababa", "[ab]2a"),  # whole periods only, the first ones
        ("aabccc", "aab[c]3"),  # the longest run
        ("aabb", "[a]2bb"),  # of equal ones the first
        ("aabaabaab", "[aab]3"),  # what is repeated in a block stays there
        ("", ""),
        ("a", "a"),
    ],
)
def test_the_longest_run_of_equal_blocks_with_the_shortest_period(text, expected):
    found = ""
    for item in fold_repeats(lettered(text), lambda item: item.name):
        if isinstance(item, Repeated):
            found += f"[{''.join(inner.name for inner in item.items)}]{item.times}"
        else:
            found += item.name
    assert found == expected


# -- against every route whose blocks are equal -----------------------------------------------------------------------


def residual(*items: Matmul | Attention) -> Residual:
    return Residual(items, items[0].input_elements)


def block_of(
    kind: str, name: str, samples: int, width: int, wide: int, heavy: tuple[int, ...] = (1, 1)
) -> list[Matmul | Residual]:
    up = dense(f"{name}.up", samples, width, wide, heavy[0])
    down = dense(f"{name}.down", samples, wide, width, heavy[1])
    if kind == "dense":
        return [dense(name, samples, width, width, heavy[0])]
    if kind == "pair":
        return [up, down]
    if kind == "branch":
        return [residual(up, down)]
    qkv = dense(f"{name}.qkv", samples, width, 3 * width, heavy[0])
    projection = dense(f"{name}.projection", samples, width, width)
    return [residual(qkv, Attention(samples, 24, 3 * samples * width), projection), residual(up, down)]


def wrapped(blocks: list, samples: int, width: int, around: str) -> tuple[list, int]:
    """With something before and after, or with one weight at both ends; and the number of the first repeated item."""
    words, size = 7 * width + 1, samples * width
    if around == "tied":
        first = Matmul("e", samples, words, width, samples, size, 4 * words * width, look_up=True, tied="e")
        return [
            first,
            *blocks,
            Matmul("h", samples, width, words, size, samples * words, 4 * words * width, tied="e"),
        ], 1
    before = [dense("before", samples, words, width)] if around in ("both", "before") else []
    return [*before, *blocks, *([dense("after", samples, width, words)] if around == "both" else [])], len(before)


def assert_equal(route: Route, before: int, times: int, per_block: int) -> None:
    steps = [step for step in route.steps if isinstance(step, Step)]
    splits = [(step.strategy, step.enters, step.leaves) for step in steps[before : before + times * per_block]]
    assert splits == splits[:per_block] * times
    names = [step.item.name for step in steps]
    assert len(set(names)) == len(names)


@settings(max_examples=examples(150), deadline=None)
@given(
    st.sampled_from(["dense", "pair", "branch", "layer"]), st.sampled_from(["nothing", "before", "both", "tied"]),
    st.integers(1, 256), st.lists(st.integers(1, 64).map(lambda n: 8 * n), min_size=2, max_size=2, unique=True),
    st.tuples(*[st.sampled_from([1, 100, 10000])] * 2), st.integers(2, 4),
    st.sampled_from([(2, 1), (3, 1), (4, 1), (2, 2)]), st.sampled_from(["mixed", "paper"]),
    st.sampled_from(["free", "batch_split"]), st.floats(0.0, 1.0),
)  # fmt: skip
def test_the_best_of_all_routes_with_equal_blocks(
    kind, around, samples, widths, heavy, times, grid, paths, ends, share
):
    """Products that are heavy and light have strategies between which the stream has to move."""
    blocks = [item for k in range(times) for item in block_of(kind, str(k), samples, *widths, heavy)]
    items, begin = wrapped(blocks, samples, widths[0], around)
    one = Search(Chain(tuple(items), 4), costs(*grid, paths), ends, repeat=True)
    period = len(blocks) // times
    every = Every(one.chain, one.costs, ends).routes(slice(begin, begin + len(blocks)), period)
    per_block = len(Chain(tuple(blocks[:period]), 4).matmuls)

    route = one.route()
    assert route.seconds == pytest.approx(min(seconds for _, seconds in every), rel=1e-9)
    assert_equal(route, begin, times, per_block)
    seconds = sum(m.times * one.costs.collectives.seconds(m.name, m.degree, m.size) for m in messages(route, one.costs))
    assert seconds == pytest.approx(route.seconds, rel=1e-9)

    sizes = [size for size, _ in every]
    limit = min(sizes) + share * (held(route, one) - min(sizes))
    route = cheapest_within(one, limit)
    assert route.seconds == pytest.approx(least(every, limit), rel=1e-9)
    assert held(route, one) <= limit * (1 + 1e-9)
    assert_equal(route, begin, times, per_block)


@pytest.mark.parametrize(("around", "heavy"), [("nothing", (1, 10000)), ("both", (10000, 1))])
def test_what_is_moved_between_blocks_is_moved_once_less_than_there_are_blocks(around, heavy):
    """Of a light and a heavy matmul, with little between them, one is split by samples: the stream has to move."""
    blocks = [item for k in range(3) for item in block_of("pair", str(k), 256, 512, 8, heavy)]
    items, begin = wrapped(blocks, 256, 512, around)
    one = Search(Chain(tuple(items), 4), costs(8, 1, "mixed"), repeat=True)
    route, every = one.route(), Every(one.chain, one.costs, "free").routes(slice(begin, begin + 6), 2)
    assert route.seconds == pytest.approx(min(seconds for _, seconds in every), rel=1e-9)
    assert sum(isinstance(step, Move) for step in route.steps) == 2


@pytest.mark.parametrize(("around", "heavy", "share"), [("nothing", (100, 1), 0.696), ("both", (1, 1), 0.319)])
def test_what_is_moved_between_blocks_counts_within_a_limit(around, heavy, share):
    blocks = [item for k in range(3) for item in block_of("pair", str(k), 256, 1024, 64, heavy)]
    items, begin = wrapped(blocks, 256, 1024, around)
    one = Search(Chain(tuple(items), 4), costs(8, 1, "mixed"), repeat=True)
    every = Every(one.chain, one.costs, "free").routes(slice(begin, begin + 6), 2)
    least_bytes = min(size for size, _ in every)
    limit = least_bytes + share * (held(one.route(), one) - least_bytes)
    route = cheapest_within(one, limit)
    assert route.seconds == pytest.approx(least(every, limit), rel=1e-9)
    assert sum(isinstance(step, Move) for step in route.steps) == 2


def test_equal_blocks_cost_more_where_a_limit_is_between_two_sizes_of_them():
    items, _ = wrapped([dense(str(k), 256, 512, 512) for k in range(4)], 256, 512, "both")
    free, equal = (Search(Chain(tuple(items), 4), costs(8, 1, "mixed"), repeat=repeat) for repeat in (False, True))
    assert equal.route().seconds >= free.route().seconds * (1 - 1e-12)
    small, large = held(free.priced(1.0, scale=0.0).route(), free), held(free.route(), free)
    found = [
        (cheapest_within(free, limit), cheapest_within(equal, limit))
        for limit in (small, (2 * small + large) / 3, large)
    ]
    assert all(one.seconds <= other.seconds * (1 + 1e-9) for one, other in found)
    assert any(one.seconds < other.seconds * (1 - 1e-6) for one, other in found)
    assert any(len(set(list(one.strategies.values())[1:-1])) > 1 for one, _ in found)


def test_given_strategies_are_kept_and_what_they_make_different_is_no_block():
    layers = [dense(str(k), 64, 512, 512) for k in range(4)]
    found = costs(8, 1, "mixed")
    odd, other = found.grid.strategy((1, 1, 8)), found.grid.strategy((1, 8, 1))
    first = Search(Chain(tuple(layers), 4), found, fixed={"0": odd}, repeat=True).route().strategies
    assert first["0"] == odd and first["1"] == first["2"] == first["3"]
    all_ = Search(Chain(tuple(layers), 4), found, fixed=dict.fromkeys("0123", other), repeat=True).route().strategies
    assert set(all_.values()) == {other}
    alternating = {str(k): (odd, other)[k % 2] for k in range(4)}
    again = Search(Chain(tuple(layers), 4), found, fixed=alternating, repeat=True).route()
    assert again.strategies == alternating


def test_too_little_memory_for_equal_blocks_says_their_least_need():
    items, begin = wrapped([dense(str(k), 8, 64, 64) for k in range(3)], 8, 64, "both")
    one = Search(Chain(tuple(items), 4), costs(4, 1, "mixed"), repeat=True)
    need = min(size for size, _ in Every(one.chain, one.costs, "free").routes(slice(begin, begin + 3), 1))
    with pytest.raises(TooLarge) as error:
        cheapest_within(one, 0.9 * need)
    assert error.value.least == pytest.approx(need)


def test_a_hundred_equal_layers_are_planned_quickly():
    samples, hidden = 2**20, 8192
    blocks = [item for k in range(100) for item in block_of("layer", str(k), samples, hidden, 4 * hidden)]
    items, _ = wrapped(blocks, samples, hidden, "tied")
    for shape, limit_s in (((16384, 1), 1.0), ((128, 8), 5.0)):
        one = Search(Chain(tuple(items), 4), costs(*shape, "mixed"), repeat=True)
        route = within_s(limit_s, one.route, tries=1)
        assert_equal(route, 1, 100, 4)
        small = held(one.priced(1.0, scale=0.0).route(), one)
        route = within_s(limit_s + 1, partial(cheapest_within, one, (small + held(route, one)) / 2), tries=1)
        assert_equal(route, 1, 100, 4)
