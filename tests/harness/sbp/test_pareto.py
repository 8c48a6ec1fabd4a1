"""What is pareto_optimal against a comparison of all with all; pairs of equal keys against two loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.sbp.pareto import SLOTS, matches, pareto_optimal, ranks
from tests.tiers import examples

BITS = 20


def kept(group: np.ndarray, seconds: np.ndarray, bytes_: np.ndarray) -> list[tuple[int, int, int]]:
    found = pareto_optimal((group << BITS) + bytes_, seconds, BITS)
    return [(int(group[k]), int(bytes_[k]), int(seconds[k])) for k in found]


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(0, 6)), max_size=40))
def test_what_nothing_equals_or_beats_stays_once_and_in_order(entries):
    group, bytes_, seconds = (np.array([entry[k] for entry in entries], dtype=np.int64) for k in range(3))
    best = {
        one
        for one in entries
        if not any(o[0] == one[0] and o[1] <= one[1] and o[2] <= one[2] and o != one for o in entries)
    }
    assert kept(group, seconds, bytes_) == sorted(best)


@pytest.mark.parametrize("different", [1 << 8, 1 << SLOTS, 1 << 30])
def test_among_many_the_same_ones_stay(different):
    """So many that they are thinned out first, with keys that share slots and keys that do not."""
    draw, many = np.random.default_rng(0), 3 << SLOTS
    group, bytes_ = draw.integers(0, 5, many), draw.integers(0, min(different, 1 << BITS), many)
    seconds = (1 << BITS) - 1 - bytes_ // 2 - draw.integers(0, 1 << 10, many)
    expected = []
    for one in range(5):
        least = 1 << BITS
        for size, second in sorted(zip(bytes_[group == one], seconds[group == one], strict=True)):
            if second < least:
                expected.append((one, int(size), int(second)))
                least = second
    assert kept(group, seconds, bytes_) == expected


@given(st.lists(st.integers(0, 5), max_size=12), st.lists(st.integers(0, 5), max_size=12))
def test_pairs_of_equal_keys(left, right):
    ones, others = matches(np.array(left, dtype=np.int64), np.array(right, dtype=np.int64))
    expected = [(i, j) for i, one in enumerate(left) for j, other in enumerate(right) if one == other]
    assert list(zip(ones.tolist(), others.tolist(), strict=True)) == expected


def test_ranks_are_in_order_and_equal_for_equal_ones():
    assert ranks(np.array([0.3, -1.0, 0.3, 2.0])).tolist() == [1, 0, 1, 2]
