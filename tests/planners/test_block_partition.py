from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planners.block_partition import Matrix, barany_grinberg, even, exact
from tests.planners.strategies import cuttings
from tests.support.quick import within_s

DIGITS_OF_PI = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def table(weights: Sequence[float]) -> Matrix:
    """The costs of blocks that cost the sum of their elements."""
    size = len(weights)
    return np.array([[sum(weights[i : j + 1]) if i <= j else np.inf for j in range(size)] for i in range(size)])


def exact_sums(weights: Sequence[float], blocks: int) -> list[int]:
    costs = table(weights)
    return exact([costs] * blocks, np.zeros_like(costs))


def sums(weights: Sequence[float], sizes: Sequence[int]) -> list[float]:
    ends = list(accumulate(sizes))
    assert ends[-1] == len(weights)
    assert min(sizes) > 0
    return [sum(weights[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


@pytest.mark.parametrize(
    ("elements", "blocks", "sizes"), [(11, 4, [3, 3, 3, 2]), (8, 4, [2, 2, 2, 2]), (3, 3, [1, 1, 1]), (5, 1, [5])]
)
def test_even_blocks_give_the_remainder_to_the_first(elements: int, blocks: int, sizes: list[int]) -> None:
    assert even(elements, blocks) == sizes


@pytest.mark.parametrize(("blocks", "largest"), [(1, 44), (2, 23), (3, 17), (4, 14), (11, 9)])
def test_exact_largest_block_of_the_digits_of_pi(blocks: int, largest: int) -> None:
    sizes = exact_sums(DIGITS_OF_PI, blocks)
    assert len(sizes) == blocks
    assert max(sums(DIGITS_OF_PI, sizes)) == largest


@st.composite
def any_costs(draw: st.DrawFn) -> tuple[list[Matrix], Matrix]:
    """A table of its own for each block, without any structure, and what is sent."""
    size = draw(st.integers(1, 6))
    blocks = draw(st.integers(1, size))
    impossible = np.tri(size, k=-1, dtype=bool)
    numbers = st.lists(st.integers(0, 5), min_size=size * size, max_size=size * size)
    drawn = [np.array(draw(numbers), dtype=np.float64).reshape(size, size) for _ in range(blocks + 1)]
    return [np.where(impossible, np.inf, costs) for costs in drawn[1:]], drawn[0]


@given(any_costs())
def test_exact_is_the_brute_force_optimum_for_any_costs(case: tuple[list[Matrix], Matrix]) -> None:
    costs, sent = case

    def value(sizes: tuple[int, ...]) -> tuple[float, float, float]:
        spans = [(end - size, end - 1) for size, end in zip(sizes, accumulate(sizes), strict=True)]
        found = [table[span] for table, span in zip(costs, spans, strict=True)]
        return max(found), sum(sent[span] for span in spans), sum(cost**2 for cost in found)

    best = min(value(sizes) for sizes in cuttings(len(sent), len(costs)))
    assert value(tuple(exact(costs, sent))) == best


def test_of_equal_largest_costs_the_one_that_sends_least_is_taken() -> None:
    sent = np.zeros((4, 4))
    sent[1:] = [[7], [2], [7]]  # to a block that begins with element 1, 2 or 3
    assert exact([table([4, 1, 1, 1])] * 2, sent) == [1, 3]  # 4 | 3; 5 | 2 sends less, but its largest is 5
    assert exact([table([4, 0, 1, 1])] * 2, sent) == [2, 2]


def test_of_equal_costs_and_bytes_the_most_even_is_taken() -> None:
    assert sorted(exact_sums([1.0] * 13, 4)) == [3, 3, 3, 4]


def test_costs_that_differ_by_rounding_alone_are_equal() -> None:
    """Cut before element 1 the largest cost is 0.3, before element 2 it is a sum of three 0.1, and less is sent."""
    rounded = 0.1 + 0.1 + 0.1
    assert rounded > 0.3
    costs = np.array([[0.3, rounded, 9], [np.inf, 0.2, 0.2], [np.inf, np.inf, 0.2]])
    sent = np.array([[0.0] * 3, [5.0] * 3, [1.0] * 3])
    assert exact([costs] * 2, sent) == [2, 1]


WEIGHTS = st.lists(st.integers(0, 9).map(float) | st.integers(0, 1000).map(float), min_size=1, max_size=14)


@given(WEIGHTS, st.data())
def test_barany_grinberg_keeps_its_bound_exact_is_never_worse(weights: Sequence[float], data: st.DataObject) -> None:
    blocks = data.draw(st.integers(1, len(weights)))
    found = sums(weights, barany_grinberg(weights, blocks))
    assert len(found) == blocks
    assert max(found) - min(found) <= max(weights)
    assert max(sums(weights, exact_sums(weights, blocks))) <= max(found)


@given(st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=40), st.data())
def test_barany_grinberg_keeps_its_bound_for_floats(weights: Sequence[float], data: st.DataObject) -> None:
    found = sums(weights, barany_grinberg(weights, data.draw(st.integers(1, len(weights)))))
    assert max(found) - min(found) <= max(weights) * (1 + 1e-6)


@pytest.mark.parametrize(
    ("weights", "blocks", "sizes"),
    [
        ([4, 1, 7, 3], 2, [2, 2]),  # 4 1 7 | 3 -> 4 1 | 7 3
        ([1, 3, 6, 5, 3], 3, [2, 1, 2]),  # 1 3 6 | 5 | 3 -> 1 3 6 | | 5 3 -> 1 3 | 6 | 5 3
        ([8, 1, 5, 1, 1, 7], 5, [1, 1, 1, 1, 2]),  # 8 | 1 5 | | 1 1 7 | -> 8 | 1 5 | 1 | 1 7 |, then 1 5 is cut
    ],
)
def test_barany_grinberg_moves_one_element_at_a_time(weights: list[int], blocks: int, sizes: list[int]) -> None:
    """From cuts at equal shares of the sum, until largest - smallest is at most the largest element."""
    assert barany_grinberg(weights, blocks) == sizes


def test_barany_grinberg_leaves_no_block_empty() -> None:
    """Cuts at equal shares would leave the first two or the last two blocks without an element."""
    assert barany_grinberg([1, 0, 0], 3) == [1, 1, 1]
    assert barany_grinberg([0, 0, 1], 3) == [1, 1, 1]


def test_two_thousand_layers_take_no_time() -> None:
    rising = [1.0 + i for i in range(2133)]
    found = sums(rising, within_s(3, lambda: barany_grinberg(rising, 8)))
    best = sums(rising, within_s(3, lambda: exact_sums_of_many(rising, 8)))
    assert max(found) - min(found) <= 2133
    assert max(best) <= max(found)


def exact_sums_of_many(weights: Sequence[float], blocks: int) -> list[int]:
    prefix = np.concatenate(([0.0], np.cumsum(weights)))
    costs = prefix[None, 1:] - prefix[:-1, None]
    costs[np.tri(len(weights), k=-1, dtype=bool)] = np.inf
    return exact([costs] * blocks, np.zeros_like(costs))


@pytest.mark.parametrize("blocks", [0, 4])
def test_impossible_numbers_of_blocks_are_refused(blocks: int) -> None:
    for cut in (even, lambda n, k: barany_grinberg([1.0] * n, k), lambda n, k: exact_sums([1.0] * n, k)):
        with pytest.raises(ValueError, match=f"3 elements cannot be cut into {blocks} blocks: 1 to 3 are possible"):
            cut(3, blocks)
