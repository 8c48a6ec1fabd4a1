from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.core.plan import Stage
from planners.periodic.contiguous_partition import best
from planners.periodic.label_search import Run, Search, pareto_optimal
from planners.periodic.layer_ticks import Chain, Shared
from planners.periodic.min_period import fixed_point, possible, stages_from_runs
from tests.planners.periodic.brute_force_period import shortest
from tests.planners.periodic.contiguous_cases import chain, chains
from tests.planners.strategies import cuttings
from tests.tiers import examples


def allocations(layers: int, normals: int) -> Iterator[list[Run]]:
    """All ways to cut a chain and to give pieces to the special device, never two neighbours."""
    for count in range(1, layers + 1):
        for sizes in cuttings(layers, count):
            for marks in range(2**count):
                special = [bool(marks >> j & 1) for j in range(count)]
                if special.count(False) <= normals and not any(a and b for a, b in pairwise(special)):
                    ends = [sum(sizes[: j + 1]) for j in range(count)]
                    yield [(end - size, end - 1, s) for size, end, s in zip(sizes, ends, special, strict=True)]


def allowed(chain: Chain, runs: Sequence[Run], period: int) -> bool:
    """The rules, stated with what is left of the group instead of with delays."""
    group, room = 1, period
    load = 0
    fixed = []
    stored = Counter({0: 0})
    here = []
    for first, last, special in reversed(runs):
        own = sum(chain.forward[first : last + 1]) + sum(chain.backward[first : last + 1])
        if own > period:
            return False
        if own > room:
            group, room = group + 1, period
        room -= own
        if special:
            load += own
            fixed.append(chain.held(first, last, group - 1))
            stored[group] += sum(chain.stored[first : last + 1])
            here.append((first, last))
        elif chain.held(first, last, group) > chain.memory:
            return False
        message = chain.sent[first] + chain.returned[first]
        if first and chain.duplex == "half":
            if message > period:
                return False
            if message > room:
                group, room = group + 1, period
            room -= message
        elif first:
            if max(chain.sent[first], chain.returned[first]) > period:
                return False
            while message > room:
                message, group, room = message - room, group + 1, period
            room -= message
    twice = sum(one.bytes * max(0, sum(_any(one, *run) for run in here) - 1) for one in chain.shared)
    return load <= period and sum(fixed) - twice + max(stored.values()) <= chain.memory


def _any(one: Shared, first: int, last: int) -> bool:
    return any(first <= layer <= last for layer in one.layers)


def smallest(chain: Chain, devices: int) -> int | None:
    """The least period of all allocations, tried one after the other."""
    every = list(allocations(chain.layers, devices - 1))
    longest = max(1, chain.loads[-1] + sum(chain.crossing))
    periods = range(max(1, -(-chain.loads[-1] // devices)), longest + 1)
    return next((period for period in periods if any(allowed(chain, runs, period) for runs in every)), None)


def runs_of(stages: Sequence[Stage]) -> list[Run]:
    devices = [stage.device for stage in stages]
    return [(stage.first, stage.last, devices.count(stage.device) > 1) for stage in stages]


ALTERNATING = replace(
    chain([(3, 3), (2, 1), (1, 3), (1, 1), (1, 1), (1, 1), (3, 1)]),
    state=(0, 0, 0, 1, 0, 1, 2),
    stored=(3, 5, 5, 5, 3, 3, 7),
    sent=(0, 1, 0, 1, 0, 0, 0, 0),
    returned=(0, 1, 0, 1, 0, 0, 0, 0),
    memory=16,
)
"""13 ticks on 3 devices, 14 if a label with the special device at its front takes the place of one without."""

FILLED = replace(
    chain([(1, 2), (2, 3), (3, 1), (2, 2), (1, 1), (0, 2)]),
    state=(1, 0, 2, 0, 0, 2),
    stored=(5, 1, 7, 4, 8, 2),
    sent=(0, 1, 1, 0, 1, 0, 0),
    returned=(0, 1, 1, 0, 1, 0, 0),
    memory=12,
)
"""19 ticks on 3 devices, 22 if the special device's bytes without what it has once more are left out."""

LARGEST = replace(
    chain([(0, 3), (0, 1), (3, 3), (3, 2), (3, 2), (1, 3), (3, 2), (0, 1)]),
    state=(2, 2, 0, 2, 2, 1, 2, 2),
    stored=(6, 4, 3, 3, 4, 3, 5, 7),
    sent=(0, 1, 0, 1, 1, 0, 1, 0, 0),
    returned=(0, 1, 0, 1, 1, 0, 1, 0, 0),
    memory=20,
    shared=(Shared(2, (0, 1)),),
)
"""20 ticks on 3 devices, 27 if the most that it stores in a group is left out."""

TOGETHER = replace(
    chain([(0, 1), (3, 1), (1, 1), (1, 1), (1, 2), (0, 3), (1, 3), (1, 3)]),
    state=(0, 0, 1, 0, 0, 1, 1, 2),
    stored=(6, 0, 8, 2, 2, 4, 1, 2),
    sent=(0, 0, 1, 0, 0, 0, 0, 1, 0),
    returned=(0, 0, 1, 0, 0, 0, 0, 1, 0),
    memory=18,
)
"""12 ticks on 3 devices, 14 if what it stores in the current group is left out."""

LOADED = replace(
    chain([(2, 3), (1, 2), (0, 1), (2, 1), (3, 3), (0, 2), (3, 2), (3, 1)]),
    state=(0, 0, 1, 0, 1, 0, 2, 4),
    stored=(0, 1, 4, 3, 2, 0, 4, 0),
    sent=(0, 0, 0, 0, 0, 0, 0, 0, 0),
    returned=(0, 0, 0, 0, 0, 0, 0, 0, 0),
    memory=11,
    shared=(Shared(2, (6, 7)),),
)
"""14 ticks on 3 devices, 16 if the special device's load is left out."""

SHARING = replace(
    chain([(1, 3), (2, 1), (3, 2), (2, 2), (3, 2), (2, 2)]),
    state=(3, 2, 1, 1, 3, 1),
    stored=(1, 1, 0, 1, 2, 3),
    sent=(0, 1, 0, 0, 0, 0, 0),
    returned=(0, 1, 0, 0, 0, 0, 0),
    memory=8,
    shared=(Shared(2, (0, 4)),),
)
"""12 ticks on 3 devices, 13 if it does not matter what shared state the special device has."""


@settings(max_examples=examples(80))
@given(chains(most=7, longest=3, messages=3), st.integers(2, 4))
@example(ALTERNATING, 3)
@example(FILLED, 3)
@example(LARGEST, 3)
@example(TOGETHER, 3)
@example(LOADED, 3)
@example(SHARING, 3)
def test_the_period_is_the_least_of_all_allocations(chain: Chain, devices: int) -> None:
    found = fixed_point(chain, devices)
    assert (found and found.period) == smallest(chain, devices)
    if found is not None:
        runs = runs_of(found.stages)
        assert allowed(chain, runs, found.period) and possible(chain, runs, found.period)
        assert len({first for first, _, special in runs if special}) != 1
        numbers = list(dict.fromkeys(stage.device for stage in found.stages))
        assert numbers == list(range(len(numbers))) and len(numbers) <= devices


@given(chains(most=5, longest=3), st.data())
def test_possible_is_what_the_rules_say(chain: Chain, data: st.DataObject) -> None:
    runs = data.draw(st.sampled_from(list(allocations(chain.layers, 3))))
    period = data.draw(st.integers(1, 40))
    assert possible(chain, runs, period) == allowed(chain, runs, period)


@given(chains(most=6), st.integers(1, 4), st.integers(-3, 90))
def test_where_it_begins_to_look_does_not_matter(chain: Chain, devices: int, upper: int) -> None:
    found, other = fixed_point(chain, devices), fixed_point(chain, devices, upper)
    assert (found and found.period) == (other and other.period)


@given(chains(most=6), st.integers(1, 4))
def test_consecutive_stages_are_never_shorter(chain: Chain, devices: int) -> None:
    plan, bound = best(chain, devices), fixed_point(chain, devices)
    if plan is not None:
        assert bound is not None and bound.period <= plan[0]
        if devices == 1:
            assert bound.period == plan[0]


def test_one_device_around_another() -> None:
    """Loads 2, 4, 2: with two consecutive stages one has 6."""
    found = fixed_point(chain([(1, 1), (2, 2), (1, 1)]), 2)
    assert found is not None
    assert found.period == 4
    assert found.stages == (Stage(0, 0, 0), Stage(1, 1, 1), Stage(2, 2, 0))


@pytest.mark.parametrize(("memory", "expected"), [(3, None), (4, 6), (5, 6), (6, 4)])
def test_the_special_device_once_stores_a_stage_fully(memory: int, expected: int | None) -> None:
    """Layers of 2, 4 and 2 ticks that store 1, 1 and 4 bytes.

    period 4   layer     0   1   2      device 0 has layers 0 and 2: (3 - 1) x 1 + (1 - 1) x 4, and 4 more
               group     3   2   1      device 1 has layer 1: 2 x 1
    period 6   group     2   2   1      device 0 has layers 0 and 1: 2 x 2
    """
    three = replace(chain([(1, 1), (2, 2), (1, 1)]), stored=(1, 1, 4), memory=memory)
    found = fixed_point(three, 2)
    assert (found and found.period) == expected


def test_without_memory_there_is_none() -> None:
    assert fixed_point(replace(chain([(1, 1)] * 3), state=(9, 9, 9), memory=8), 4) is None


@given(chains(most=6, shortest=1), st.integers(2, 4))
def test_large_numbers_are_as_exact_as_small_ones(chain: Chain, devices: int) -> None:
    ticks, size = 2**39 + 1, 2**31 + 1

    def times(values: tuple[int, ...], factor: int) -> tuple[int, ...]:
        return tuple(value * factor for value in values)

    large = Chain(
        times(chain.forward, ticks), times(chain.backward, ticks), times(chain.state, size), times(chain.stored, size),
        times(chain.sent, ticks), times(chain.returned, ticks), times(chain.buffers, size), chain.memory * size,
        duplex=chain.duplex, shared=tuple(Shared(one.bytes * size, one.layers) for one in chain.shared),
    )  # fmt: skip
    small, found = fixed_point(chain, devices), fixed_point(large, devices)
    if chain.duplex == "half":
        assert (found and found.period) == (small and small.period * ticks)
    else:
        assert (found is None) == (small is None)


@settings(max_examples=examples(40), deadline=None)
@given(chains(most=3, shortest=1, longest=2, messages=1), st.integers(2, 3))
def test_no_pattern_is_shorter(chain: Chain, devices: int) -> None:
    """In full duplex the period is rounded up to a tick."""
    found = fixed_point(chain, devices)
    for runs in allocations(chain.layers, devices - 1):
        period = shortest(chain, stages_from_runs(runs))
        if period is not None:
            assert found is not None
            assert found.period <= period if chain.duplex == "half" else found.period < period + 1


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=100))
def test_undominated(columns: list[tuple[int, ...]]) -> None:
    kept = [columns[n] for n in pareto_optimal(np.array(columns).T)]
    least = {
        one
        for one in columns
        if not any(o != one and all(x <= y for x, y in zip(o, one, strict=True)) for o in columns)
    }
    assert sorted(kept) == sorted(least)


@given(chains(most=6, longest=3), st.integers(1, 4), st.integers(1, 40))
def test_cannot_fit_is_right(chain: Chain, devices: int, period: int) -> None:
    if Search(chain, devices).at(period).cannot_fit():
        assert not any(allowed(chain, runs, period) for runs in allocations(chain.layers, devices - 1))
