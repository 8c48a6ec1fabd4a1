from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from harness.core.plan import Stage
from planners.periodic.layer_ticks import Chain
from planners.periodic.retiming import Laps, laps_from_starts, retime, sharing
from planners.periodic.task_times import Task, path
from tests.planners.periodic.brute_force import chains, check
from tests.tiers import examples

NOTHING = (0, 0, 0)
TWO = Chain((1, 1), (2, 2), (0, 0), (1, 1), NOTHING, NOTHING, NOTHING, 100)
"""Two layers of 1 and 2 ticks, messages take no time."""
APART = (Stage(0, 0, 0), Stage(1, 1, 1))


def test_orders_that_wait_for_nobody_reach_the_load_of_the_busiest_device() -> None:
    """Tasks F0 sent F1 B1 returned B0: stage 0 begins the next micro-batch before it ends the first.

    device 0   F0 .  . B0 B0 | F0       F0 at 0, B0 at 4 = 1 period and 1 tick later
    device 1   .  F1 B1 B1
    """
    found = retime(TWO, APART, {(0, 5): 1, (1, 4): 0, (2, 3): 0})
    assert found is not None
    check(found)
    assert found.period == 3
    assert found.starts == (0, 1, 1, 2, 4, 4)
    assert found.activations() == (2, 1)


def test_fewer_laps_take_a_longer_period() -> None:
    found = retime(TWO, APART, {(0, 5): 0, (1, 4): 0, (2, 3): 0})
    assert found is not None
    assert (found.period, found.activations()) == (6, (1, 1))


def test_a_period_can_be_a_fraction() -> None:
    """Stages on devices 1, 2, 0, 1; stage 0 stores three or four micro-batches."""
    nothing = (0,) * 4
    chain = Chain((1, 2, 3, 3), (3, 3, 2, 1), nothing, (1,) * 4, (0, 1, 1, 0, 0), (0, 2, 2, 1, 0), (0,) * 5, 4)
    stages = tuple(Stage(layer, layer, device) for layer, device in enumerate((1, 2, 0, 1)))
    own = {(0, 6): 1, (0, 7): 1, (0, 13): 3, (6, 7): 0, (6, 13): 1, (7, 13): 1}
    found = retime(chain, stages, own | {(1, 12): 2, (2, 11): 2, (3, 10): 1, (4, 9): 1, (5, 8): 0})
    assert found is not None
    check(found)
    assert found.period == Fraction(17, 2)


def test_laps_that_no_period_allows_have_no_timing() -> None:
    assert retime(TWO, APART, {(0, 5): -1, (1, 4): 0, (2, 3): 0}) is None


@st.composite
def orders(draw: st.DrawFn) -> tuple[Chain, tuple[Stage, ...], Laps]:
    """A chain on two devices, and the laps of some periodic schedule of it."""
    chain = draw(chains(draw(st.integers(2, 4)), longest=9, messages=5))
    stages = tuple(Stage(layer, layer, draw(st.integers(0, 1))) for layer in range(chain.layers))
    tasks = path(chain, stages)
    period = sum(task.ticks for task in tasks) + draw(st.integers(0, 3))
    starts, free = [], 0
    for task in tasks:  # one after another, but each with so many periods between
        starts.append(free + period * draw(st.integers(0, 2)))
        free = starts[-1] + task.ticks
    return chain, stages, laps_from_starts(tasks, starts, period)


def fastest(tasks: tuple[Task, ...], laps: Laps) -> float:
    """The largest lambda, by a linear program in lambda and the starts over the period."""
    rows, limits = [], []

    def at_least(later: int, earlier: int, ticks: int, periods: int) -> None:
        row = [float(ticks)] + [0.0] * len(tasks)
        row[1 + later] -= 1
        row[1 + earlier] += 1
        rows.append(row)
        limits.append(-float(periods))

    for one, two in pairwise(range(len(tasks))):
        at_least(two, one, tasks[one].ticks, 0)
    for (one, two), periods in laps.items():
        at_least(two, one, tasks[one].ticks, periods)
        at_least(one, two, tasks[two].ticks, -periods - 1)
    load = max(sum(tasks[place].ticks for place in places) for places in sharing(tasks))
    answer = linprog([-1.0] + [0.0] * len(tasks), rows, limits, bounds=[(0, 1 / load)] + [(0, None)] * len(tasks))
    return float(answer.x[0])


@settings(max_examples=examples(40), deadline=None)
@given(orders())
def test_the_period_is_the_smallest_of_its_orders(order: tuple[Chain, tuple[Stage, ...], Laps]) -> None:
    chain, stages, laps = order
    found = retime(chain, stages, laps)
    assert found is not None
    assert 1 / float(found.period) == pytest.approx(fastest(found.tasks, laps), rel=1e-6)
    assert laps_from_starts(found.tasks, found.starts, found.period).keys() == laps.keys()
    for (one, two), periods in laps.items():
        rest = found.starts[two] - found.starts[one] - periods * found.period
        assert found.tasks[one].ticks <= rest <= found.period - found.tasks[two].ticks
