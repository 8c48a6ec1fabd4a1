from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cache
from math import ceil, inf

from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.core.plan import Stage
from planners.madpipe.paper_algorithm import Grid, Program, algorithm_1
from planners.periodic.layer_ticks import Chain
from planners.periodic.min_period import Bound, fixed_point
from tests.planners.periodic.contiguous_cases import chain, chains
from tests.tiers import examples

grids = st.builds(Grid, st.integers(2, 9), st.integers(2, 6), st.integers(2, 9))
NEVER = 10**6


def recursion(chain: Chain, devices: int, period: int, grid: Grid) -> int | None:
    """T(L, P, 0, 0, 0) as the formulas say it, layers counted from 1, rounded up to ticks."""
    total, most = chain.loads[-1], chain.loads[-1] + sum(chain.crossing)
    on_loads, on_sizes, on_delays = (
        on(max(1, largest), values)
        for largest, values in ((total, grid.loads), (chain.memory, grid.sizes), (most, grid.delays))
    )

    def plus(x: Fraction, y: Fraction | int) -> Fraction:
        g = max(1, ceil(x / period))
        return x + y if x + y <= g * period else g * period + Fraction(y)

    @cache
    def least(last: int, p: int, load: Fraction, size: Fraction, delay: Fraction) -> Fraction | float:
        if last == 0:
            return 0
        found: Fraction | float = inf
        for k in range(1, last + 1):
            own = chain.loads[last] - chain.loads[k - 1]
            g = max(1, ceil((delay + own) / period))
            next_delay = on_delays(plus(plus(delay, own), chain.crossing[k - 1]))
            cut = chain.busy(k - 1)
            if p > 1 and chain.held(k - 1, last - 1, g) <= chain.memory:
                found = min(found, max(own, cut, least(k - 1, p - 1, load, size, next_delay)))
            more = size + chain.held(k - 1, last - 1, g - 1)
            if more <= chain.memory:
                rest = least(k - 1, p, on_loads(load + own), on_sizes(more), next_delay)
                found = min(found, max(load + own, cut, rest))
        return found

    zero = Fraction(0)
    value = least(chain.layers, devices, zero, zero, zero)
    return None if value == inf else ceil(value)


def on(largest: int, values: int) -> Callable[[Fraction], Fraction]:
    step = Fraction(largest, values - 1)
    return lambda value: step * ceil(value / step)


def unrounded(chain: Chain) -> Grid:
    """Every sum of whole ticks and bytes is on this grid."""
    total = chain.loads[-1]
    return Grid(max(1, total) + 1, max(1, chain.memory) + 1, max(1, total + sum(chain.crossing)) + 1)


def value(chain: Chain, devices: int, period: int, grid: Grid) -> int | None:
    found = Program(chain, devices, period, grid).shortest(NEVER)
    return found and found[0]


@settings(max_examples=examples(150))
@given(chains(most=5, longest=4, messages=3), st.integers(1, 4), st.integers(1, 30))
def test_on_a_grid_of_ticks_it_is_the_recursion(chain: Chain, devices: int, period: int) -> None:
    grid = unrounded(chain)
    assert value(chain, devices, period, grid) == recursion(chain, devices, period, grid)


@settings(max_examples=examples(150))
@given(chains(most=5, longest=4, messages=3), st.integers(1, 4), st.integers(1, 30), grids)
def test_on_any_grid_it_is_the_recursion(chain: Chain, devices: int, period: int, grid: Grid) -> None:
    assert value(chain, devices, period, grid) == recursion(chain, devices, period, grid)


@given(chains(most=5, longest=4, messages=3), st.integers(2, 4), st.integers(1, 30), grids, st.integers(2, 4))
def test_rounding_never_shortens(chain: Chain, devices: int, period: int, grid: Grid, parts: int) -> None:
    """With one target, a grid gives at least what a finer one gives that has all of its values."""
    finer = Grid(*((values - 1) * parts + 1 for values in (grid.loads, grid.sizes, grid.delays)))
    coarse, fine, exact = (value(chain, devices, period, g) or NEVER for g in (grid, finer, unrounded(chain)))
    assert coarse >= fine >= exact


@settings(max_examples=examples(150))
@given(chains(most=5, longest=4, messages=3), st.integers(1, 4), grids, st.integers(1, 6))
@example(
    replace(chain([(0, 0), (0, 0), (0, 1), (0, 3), (0, 1)]), stored=(0, 0, 3, 0, 0), memory=12), 3, Grid(2, 2, 2), 2
)
def test_the_search_for_the_target(chain: Chain, devices: int, grid: Grid, iterations: int) -> None:
    """Algorithm 1, line by line."""
    low = target = max(1, ceil(Fraction(chain.loads[-1], devices)))
    high = max(low, chain.loads[-1] + sum(chain.crossing))
    best = None
    for _ in range(iterations):
        period = recursion(chain, devices, target, grid)
        if period is None:
            low = max(low, target)
        else:
            both = max(period, target)
            best = both if best is None else min(best, both)
            low, high = max(low, min(period, target)), min(high, both)
        target = (low + high) // 2
    found = algorithm_1(chain, devices, grid, iterations)
    assert (found and found.period) == best


def test_the_special_device_has_one_activation_too_few() -> None:
    """Layers of 2, 4 and 2 ticks that store 1, 1 and 4 bytes, on two devices of 5 bytes.

    With 4 ticks the groups are 3, 2 and 1. Device 0 has layers 0 and 2: (3 - 1) x 1 + (1 - 1) x 4 bytes are said to be
    enough, but when layer 2 runs it stores 4 more.
    """
    three = replace(chain([(1, 1), (2, 2), (1, 1)]), stored=(1, 1, 4), memory=5)
    published, exact = algorithm_1(three, 2), fixed_point(three, 2)
    assert published == Bound(4, (Stage(0, 0, 0), Stage(1, 1, 1), Stage(2, 2, 0)))
    assert exact is not None and exact.period == 6


def test_without_memory_there_is_none() -> None:
    assert algorithm_1(replace(chain([(1, 1)] * 3), state=(9, 9, 9), memory=8), 4) is None


def test_other_grids_may_be_better_though_coarser() -> None:
    """Of loads 0, 1, 3 and 2 the special device takes 2 and then 1. 2 is on the grid 0, 2, 4; on 0, 1.5, 3 it is 3."""
    four = chain([(0, 0), (0, 1), (0, 3), (0, 2)])
    assert [value(four, 2, 1, Grid(loads=n)) for n in (4, 5)] == [3, 4]
