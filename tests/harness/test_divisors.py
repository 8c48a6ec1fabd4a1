from hypothesis import given
from hypothesis import strategies as st

from harness import divisors


@given(st.integers(1, 500))
def test_all_divisors_in_order(number):
    assert divisors.of(number) == [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def test_the_divisors_on_both_sides_the_nearer_one_first():
    assert divisors.around(512, 7) == [8, 4]
    assert divisors.around(12, 5) == [6, 4], "of two as near the larger one"
    assert divisors.around(16, 32) == [16]
