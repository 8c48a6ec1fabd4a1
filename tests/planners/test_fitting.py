"""The search between what fits and what does not, on lists of routes whose needs are made up."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from harness.sbp.limit import TooLarge
from harness.sbp.optimum import Route
from planners.fitting import fitting

Options = list[tuple[float, float, float]]
"""(seconds, bytes held, bytes beside)"""


def fitted(options: Options, there: float) -> float:
    """The seconds of the route that is found; a route is told by them."""
    of = {seconds: (held, beside) for seconds, held, beside in options}

    def find(limit: float) -> Route:
        small = [seconds for seconds, held, _ in options if held <= limit]
        if not small:
            raise TooLarge(min(held for _, held, _ in options))
        return Route((), min(small))

    return fitting(there, find, lambda route: sum(of[route.seconds]), lambda route: of[route.seconds][0]).seconds


options = st.lists(
    st.tuples(*3 * [st.integers(1, 40).map(float)]), min_size=1, max_size=8, unique_by=lambda one: one[0]
)


@given(options, st.integers(2, 80))
def test_what_is_found_fits_and_is_refused_only_where_the_smallest_does_not(options: Options, there: int) -> None:
    need = {seconds: held + beside for seconds, held, beside in options}
    try:
        assert need[fitted(options, there)] <= there
    except TooLarge as error:
        assert error.least > there
        assert error.least in need.values()
        assert need[fitted(options, error.least)] <= error.least, "what is told is enough"


@given(options, st.integers(2, 80), st.integers(0, 40))
@example([(9.0, 1.0, 0.0), (5.0, 10.0, 0.0), (1.0, 20.0, 0.0)], 20, 5)  # the smallest is not the cheapest
def test_with_the_same_needs_beside_it_is_the_cheapest_that_fits(options: Options, there: int, beside: int) -> None:
    options = [(seconds, held, beside) for seconds, held, _ in options]
    fits = [seconds for seconds, held, _ in options if held + beside <= there]
    if fits:
        assert fitted(options, there) == min(fits)
    else:
        with pytest.raises(TooLarge) as told:
            fitted(options, there)
        assert told.value.least == min(held for _, held, _ in options) + beside
