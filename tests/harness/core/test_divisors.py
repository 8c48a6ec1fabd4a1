import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core import divisors


@given(st.integers(1, 500))
def test_all_divisors_in_order(number):
    assert divisors.list_divisors(number) == [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def test_the_divisors_on_both_sides_the_nearer_one_first():
    assert divisors.nearest_divisors(512, 7) == [8, 4]
    assert divisors.nearest_divisors(12, 5) == [6, 4], "of two as near the larger one"
    assert divisors.nearest_divisors(16, 32) == [16]


@pytest.mark.timeout(20)
def test_a_number_that_no_run_has_takes_no_time():
    """Those of 2**61 - 1, a prime, would take minutes."""
    assert divisors.list_divisors(2**61 - 1) == [1, 2**61 - 1]
    assert divisors.nearest_divisors(10**30, 3) == [4, 2]
    assert divisors.list_divisors(10**6 * 999_983)[-3:] == [10**6 * 999_983 // n for n in (4, 2, 1)]
