"""The search between what fits and what does not, on lists of routes whose needs are made up."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from harness.sbp.memory_limit import TooLarge
from harness.sbp.shortest_path import Route
from planners.memory_bisection import cheapest_that_fits

Options = list[tuple[float, float, float]]
"""(seconds, bytes held, other bytes)"""


def fitted(options: Options, there: float) -> float:
    """The seconds of the route that is found; a route is identified by them."""
    of = {seconds: (held, other) for seconds, held, other in options}

    def find(limit: float) -> Route:
        small = [seconds for seconds, held, _ in options if held <= limit]
        if not small:
            raise TooLarge(min(held for _, held, _ in options))
        return Route((), min(small))

    return cheapest_that_fits(
        there, find, lambda route: sum(of[route.seconds]), lambda route: of[route.seconds][0]
    ).seconds


options = st.lists(
    st.tuples(*3 * [st.integers(1, 40).map(float)]), min_size=1, max_size=8, unique_by=lambda one: one[0]
)


@given(options, st.integers(2, 80))
def test_what_is_found_fits_and_is_refused_only_where_the_smallest_does_not(options: Options, there: int) -> None:
    need = {seconds: held + other for seconds, held, other in options}
    try:
        assert need[fitted(options, there)] <= there
    except TooLarge as error:
        assert error.least > there
        assert error.least in need.values()
        assert need[fitted(options, error.least)] <= error.least, "the reported need is enough"


@given(options, st.integers(2, 80), st.integers(0, 40))
@example([(9.0, 1.0, 0.0), (5.0, 10.0, 0.0), (1.0, 20.0, 0.0)], 20, 5)  # the smallest is not the cheapest
def test_with_the_same_other_needs_it_is_the_cheapest_that_fits(options: Options, there: int, other: int) -> None:
    options = [(seconds, held, other) for seconds, held, _ in options]
    fits = [seconds for seconds, held, _ in options if held + other <= there]
    if fits:
        assert fitted(options, there) == min(fits)
    else:
        with pytest.raises(TooLarge) as raised:
            fitted(options, there)
        assert raised.value.least == min(held for _, held, _ in options) + other
