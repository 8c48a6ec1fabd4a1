from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core.cluster import Duplex
from harness.core.plan import Stage
from planners.periodic.contiguous_partition import Search, best, least_memory
from planners.periodic.layer_ticks import TICKS, Chain
from planners.periodic.one_f_one_b_star import groups, smallest_period
from tests.planners.periodic.contiguous_cases import chain, chains, into, partitions
from tests.support.quick import within_s
from tests.tiers import examples


def test_with_memory_the_loads_are_balanced() -> None:
    found = best(chain([(1, 2), (1, 1), (2, 2), (1, 3)]), 2)
    assert found == (8, into([2, 2]))


def test_a_cut_is_avoided_whose_link_would_be_the_busiest() -> None:
    assert best(chain([(1, 1)] * 4, [0, 9, 0]), 2) in ((6, into([3, 1])), (6, into([1, 3])))
    assert best(chain([(1, 1)] * 4, [9, 9, 9]), 2) == (8, into([4]))


def test_a_full_duplex_link_is_busy_for_half_the_time() -> None:
    """All cuts send 4 ticks each way; with both ways at once a cut pays."""
    loads, messages = [(3, 3), (0, 1), (3, 3)], [4, 4]
    half, full = best(chain(loads, messages), 3), best(chain(loads, messages, duplex="full"), 3)
    assert half is not None and (half[0], len(half[1])) == (8, 2)
    assert full is not None and (full[0], len(full[1])) == (6, 3)


def test_less_memory_moves_layers_to_the_end() -> None:
    """Each layer stores a byte for each micro-batch; of two stages the first one stores two, unless T = 12."""
    six = [(1, 1)] * 6
    found = {memory: best(chain(six, memory=memory), 2) for memory in (6, 5, 4, 3)}
    assert found == {6: (6, into([3, 3])), 5: (8, into([2, 4])), 4: (8, into([2, 4])), 3: (12, into([3, 3]))}
    assert best(chain(six, memory=2), 2) is None
    assert least_memory(chain(six), 2) == 3


def test_fewer_stages_where_more_are_no_faster() -> None:
    assert best(chain([(1, 1), (4, 4), (1, 1)]), 3) == (8, into([1, 1, 1]))
    assert best(chain([(0, 0), (4, 4), (0, 0)]), 3) == (8, into([3]))
    assert best(chain([(4, 4)]), 5) == (8, into([1]))


@given(chains(), st.integers(1, 7))
@settings(max_examples=examples(300))
def test_no_partition_is_better(some: Chain, devices: int) -> None:
    periods = [smallest_period(some, stages) for stages in partitions(some.layers, devices)]
    least = min((period for period in periods if period), default=None)
    found = best(some, devices)
    assert (found and found[0]) == least
    if found:
        assert smallest_period(some, found[1]) == found[0]
        first = periods.index(found[0])
        assert len(found[1]) == len([*partitions(some.layers, devices)][first])  # the fewest stages stand first
        equal = [
            stages
            for stages, period in zip(partitions(some.layers, devices), periods, strict=True)
            if period == least and len(stages) == len(found[1])
        ]
        assert _fullest(some, found[1], found[0]) == min(_fullest(some, stages, found[0]) for stages in equal)


def _fullest(some: Chain, stages: tuple[Stage, ...], period: int) -> int:
    stored = groups(some, stages, period)
    return max(some.held(stage.first, stage.last, g) for stage, g in zip(stages, stored, strict=True))


@given(chains(), st.integers(1, 7), st.integers(1, 60))
def test_a_search_finds_a_partition_wherever_there_is_one(some: Chain, devices: int, period: int) -> None:
    def has(found: int | None) -> bool:
        return found is not None and found <= period

    found = Search(some, devices).within(period)
    assert (found is not None) == any(has(smallest_period(some, stages)) for stages in partitions(some.layers, devices))
    assert found is None or has(smallest_period(some, found))


@given(chains(), st.integers(1, 7))
def test_the_least_memory_is_just_enough(some: Chain, devices: int) -> None:
    least = least_memory(some, devices)
    largest = (max(some.held(s.first, s.last, 1) for s in stages) for stages in partitions(some.layers, devices))
    assert least == min(largest)
    assert best(replace(some, memory=least), devices) is not None
    assert best(replace(some, memory=least - 1), devices) is None


@pytest.mark.parametrize("duplex", ["half", "full"])
def test_a_long_chain_is_cut_in_a_moment(duplex: Duplex) -> None:
    """150 layers on 8 devices, in ticks as of a real model; several times what it takes is allowed."""
    random.seed(5)
    ticks, layers = TICKS // 150 // 3, 150
    sent = (0, *(random.randrange(ticks // 8) for _ in range(layers - 1)), 0)
    long = Chain(
        *(tuple(random.randrange(ticks) for _ in range(layers)) for _ in range(2)),
        *(tuple(random.randrange(10**9) for _ in range(layers)) for _ in range(2)),
        sent, sent, tuple(10**7 if size else 0 for size in sent), 0, duplex=duplex,
    )  # fmt: skip
    long = replace(long, memory=2 * least_memory(long, 8))
    found = within_s(0.3, lambda: best(long, 8))
    assert found is not None and len(found[1]) == 8
    assert smallest_period(long, found[1]) == found[0]
