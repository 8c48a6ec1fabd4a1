from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core.plan import Stage
from planners.periodic.bounds import lower_bound
from planners.periodic.layer_ticks import Chain
from planners.periodic.milp import _Program, layers_apart, solve
from planners.periodic.retiming import laps_from_starts, retime
from tests.planners.periodic.brute_force import allocations, chains, check, optimum
from tests.planners.periodic.brute_force_period import shortest
from tests.planners.periodic.contiguous_cases import chain
from tests.tiers import examples

ZIGZAG = (Stage(0, 0, 0), Stage(1, 1, 1), Stage(2, 2, 0))


def zigzag(memory: int) -> Chain:
    """Stages of 3, 6 and 3 ticks on devices 0, 1, 0, messages of one tick, one byte stored of each."""
    ones = (0, 1, 1, 0)
    return Chain((1, 2, 1), (2, 4, 2), (0,) * 3, (1,) * 3, ones, ones, (0,) * 4, memory)


@pytest.mark.parametrize(("memory", "period"), [(9, 6), (4, 6), (3, 8), (2, 11)])
def test_less_memory_takes_a_longer_period(memory: int, period: int) -> None:
    found = solve(zigzag(memory), ZIGZAG, 10)
    assert found.timing is not None
    check(found.timing)
    assert found.timing.period == period == shortest(zigzag(memory), ZIGZAG)
    assert found.finished and found.bound == period


def test_a_later_stage_that_lags_stores_less() -> None:
    """When stage 0 begins a micro-batch, stage 2 on its device has not yet begun some earlier ones.

    The program itself must find it: a quick schedule may, too.
    """
    chain = Chain((1, 2, 1), (2, 4, 2), (0,) * 3, (2, 2, 3), (0, 0, 2, 0), (0, 0, 2, 0), (0,) * 4, 9)
    late = Chain((1, 1, 3, 3), (2, 2, 6, 6), (0,) * 4, (2, 2, 4, 3), (0, 2, 2, 1, 0), (0, 2, 2, 1, 0), (0,) * 5, 9)
    across = tuple(Stage(layer, layer, device) for layer, device in enumerate((2, 0, 1, 2)))
    for own, stages, period in ((chain, ZIGZAG, 6), (late, across, 12)):
        least = lower_bound(own, stages)
        assert least is not None
        found, _, finished = _Program(own, stages, least, Fraction(period) + Fraction(1, 1000)).solved(30)
        assert finished and found is not None
        check(found)
        assert found.period == period


def test_without_memory_for_one_micro_batch_there_is_no_timing() -> None:
    found = solve(zigzag(1), ZIGZAG, 10)
    assert found.timing is None and found.finished
    assert found.bound == 16  # the path


def test_what_is_not_below_is_not_returned() -> None:
    assert solve(zigzag(3), ZIGZAG, 10, Fraction(8)).timing is None
    assert solve(zigzag(3), ZIGZAG, 10, Fraction(8)).finished
    found = solve(zigzag(3), ZIGZAG, 10, Fraction(8) + Fraction(1, 1000)).timing
    assert found is not None and found.period == 8


def small(layers: int, devices: int) -> st.SearchStrategy[tuple[Chain, tuple[Stage, ...]]]:
    where = st.lists(st.integers(0, devices - 1), min_size=layers, max_size=layers)
    allocation = where.map(lambda own: tuple(Stage(layer, layer, device) for layer, device in enumerate(own)))
    return st.tuples(chains(layers), allocation)


@settings(max_examples=examples(80), deadline=None)
@given(st.one_of(small(3, 2), small(3, 3)))
def test_no_other_orders_have_a_smaller_period(case: tuple[Chain, tuple[Stage, ...]]) -> None:
    """The program itself must find it: the quick schedule before it may, too."""
    chain, stages = case
    found, expected = solve(chain, stages, 60), shortest(chain, stages)
    assert found.finished
    assert (found.timing.period if found.timing else None) == expected
    if expected is None or found.timing is None:
        return
    least = lower_bound(chain, stages)
    assert found.bound == expected and least is not None and least <= expected
    alone, _, finished = _Program(chain, stages, least, expected + Fraction(1, 1000)).solved(60)
    assert finished and alone is not None and alone.period == expected
    check(found.timing)
    check(alone)


@settings(max_examples=examples(40), deadline=None)
@given(chains(6, 9, 4), st.lists(st.integers(0, 2), min_size=6, max_size=6), st.booleans())
def test_every_timing_is_valid_and_cannot_be_retimed(chain: Chain, devices: list[int], hasty: bool) -> None:
    stages = tuple(Stage(layer, layer, device) for layer, device in enumerate(devices))
    found = solve(chain, stages, 0 if hasty else 60)
    if found.timing is None:
        assert lower_bound(chain, stages) is None
        return
    check(found.timing)
    assert found.bound <= found.timing.period
    assert hasty or found.finished
    again = retime(chain, stages, laps_from_starts(found.timing.tasks, found.timing.starts, found.timing.period))
    assert again is not None and again.period == found.timing.period


def test_time_that_is_up_leaves_the_quick_schedule_and_a_bound() -> None:
    chain, stages = hard(random.Random(2))
    hasty, patient = solve(chain, stages, 0.0), solve(chain, stages, 30.0)
    assert hasty.timing is not None and patient.timing is not None
    assert not hasty.finished and patient.finished
    check(hasty.timing)
    check(patient.timing)
    assert hasty.bound <= patient.timing.period < hasty.timing.period


def hard(rng: random.Random) -> tuple[Chain, tuple[Stage, ...]]:
    """Twelve stages on eight devices, five of them on one; a quick schedule of them is not the best."""
    forward = tuple(rng.randint(10**5, 3 * 10**5) for _ in range(12))
    messages = (0, *(rng.randint(10**4, 2 * 10**5) for _ in range(11)), 0)
    backward = tuple(2 * ticks for ticks in forward)
    stored = tuple(rng.randint(10**8, 10**9) for _ in range(12))
    chain = Chain(forward, backward, (0,) * 12, stored, messages, messages, (0,) * 13, 4 * 10**9)
    shared = (1, 4, 6, 9, 11)
    devices = iter(range(7))
    return chain, tuple(Stage(n, n, 7 if n in shared else next(devices)) for n in range(12))


def test_the_shortest_period_can_be_a_fraction() -> None:
    """Four stages on devices 1, 2, 0, 1: the best period is 8 ticks and a half, and retiming says so exactly."""
    nothing = (0,) * 4
    chain = Chain((1, 2, 3, 3), (3, 3, 2, 1), nothing, (1,) * 4, (0, 1, 1, 0, 0), (0, 2, 2, 1, 0), (0,) * 5, 4)
    stages = tuple(Stage(layer, layer, device) for layer, device in enumerate((1, 2, 0, 1)))
    found = solve(chain, stages, 60).timing
    assert found is not None
    check(found)
    assert found.period == Fraction(17, 2)


def test_twelve_stages_on_eight_devices_are_solved_within_a_minute() -> None:
    chain, stages = hard(random.Random(1))
    found = solve(chain, stages, 60)
    assert found.finished and found.timing is not None
    check(found.timing)


@pytest.mark.parametrize(
    ("most", "ranges"),
    [
        (9, [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)]),
        (3, [(0, 1), (2, 2), (3, 3), (4, 4)]),  # 1 + 1 ticks, 4 and 2: the block of 6 is cut
        (2, [(0, 2), (3, 3), (4, 4)]),
        (1, [(0, 2), (3, 3), (4, 4)]),  # what is apart stays apart
    ],
)
def test_layers_apart_are_the_same_layers_on_the_same_devices(most: int, ranges: list[tuple[int, int]]) -> None:
    some = chain([(1, 0), (1, 0), (4, 0), (1, 0), (2, 0)])
    found = layers_apart(some, (Stage(0, 2, 0), Stage(3, 3, 1), Stage(4, 4, 0)), most)
    assert found == tuple(Stage(first, last, int(first == 3)) for first, last in ranges)


def test_layers_that_do_not_run_as_one_block_beat_all_whole_stages() -> None:
    """No allocation of whole stages gets below 20 ticks; layers 0 and 3 on a device and 1 and 2 on the other, 15."""
    ticks = (3, 3, 2, 2)
    cut = (0, 1, 0, 0, 0)
    chain = Chain(ticks, tuple(2 * t for t in ticks), (0,) * 4, (2, 2, 2, 3), cut, cut, (0,) * 5, 7)
    stages = (Stage(0, 0, 0), Stage(1, 2, 1), Stage(3, 3, 0))
    apart, whole = solve(chain, layers_apart(chain, stages, 4), 60), solve(chain, stages, 60)
    assert apart.timing is not None and whole.timing is not None
    check(apart.timing)
    assert apart.timing.period == 15
    assert whole.timing.period >= 20
    best_whole, best = optimum(chain, 2, whole=True), optimum(chain, 2)
    assert best_whole is not None and best_whole.period == 20
    assert best is not None and best.period == 15


@settings(max_examples=examples(15), deadline=None)
@given(chains(3), st.integers(1, 3))
def test_the_optimum_of_all_allocations_is_theirs_by_orders(chain: Chain, devices: int) -> None:
    periods = [shortest(chain, stages) for stages in allocations(3, devices)]
    best = optimum(chain, devices)
    assert (best and best.period) == min((period for period in periods if period), default=None)


def test_a_byte_too_little_is_too_little() -> None:
    """What fits exactly fits, also where the solver's own tolerance is larger than a byte."""
    large = replace(zigzag(3), stored=(10**10 + 1, 7, 10**10 - 1), memory=3 * 10**10 + 1)
    fits = solve(large, ZIGZAG, 10)
    less = solve(replace(large, memory=3 * 10**10), ZIGZAG, 10)
    for found in (fits, less):
        assert found.timing is not None
        check(found.timing)
    assert fits.timing is not None and less.timing is not None
    assert fits.timing.period <= less.timing.period
