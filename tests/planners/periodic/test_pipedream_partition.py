from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.core.plan import Stage
from planners.periodic.layer_ticks import Chain, Shared
from planners.periodic.one_f_one_b_star import smallest_period
from planners.periodic.pipedream_partition import Estimate, estimated, least_memory, partition
from tests.planners.periodic.contiguous_cases import chain, chains, into, partitions
from tests.tiers import examples

ESTIMATES = st.sampled_from(get_args(Estimate))
TIED = replace(chain([(1, 1)] * 6, memory=1), state=(1, 1, 0, 0, 0, 0), shared=(Shared(bytes=1, layers=(0, 1)),))


def test_the_busiest_stage_or_link_is_made_least() -> None:
    assert partition(chain([(1, 2), (1, 1), (2, 2), (1, 3)]), 2, "none") == (8, into([2, 2]))
    assert partition(chain([(1, 1)] * 4, [0, 9, 0]), 2, "none") == (6, into([3, 1]))


def test_of_equal_partitions_the_first_stage_is_the_longest() -> None:
    assert partition(chain([(1, 1)] * 5), 3, "none") == (4, into([2, 2, 1]))


def test_a_device_that_does_not_help_is_left_out() -> None:
    assert partition(chain([(0, 0), (4, 4), (0, 0)]), 3, "none") == (8, into([3]))


@pytest.mark.parametrize(
    ("estimate", "expected"),
    [
        ("optimizer", [(3 + 5) * 2, (10 + 20) * 1, 0]),  # (activations + state) x (3 - 1 - position)
        ("position", [3 + 4 + 3 * 5, 10 + 8 + 2 * 20, 50 + 4 + 50]),
        ("devices", [3 + 4 + 3 * 5, 10 + 8 + 3 * 20, 50 + 4 + 3 * 50]),
        ("none", [0, 0, 0]),
    ],
)
def test_what_the_estimates_say(estimate: Estimate, expected: list[int]) -> None:
    some = replace(chain([(1, 1)] * 4), state=(3, 4, 6, 50), stored=(5, 10, 10, 50), buffers=(0, 4, 9, 4, 0))
    assert estimated(some, into([1, 2, 1]), 3, estimate) == expected


def test_the_public_estimate_forgets_the_last_stage() -> None:
    """The balanced partition has 4 bytes on each device; the last one may hold any number."""
    four = replace(chain([(1, 1)] * 4, memory=2), stored=(1, 1, 2, 2))
    assert partition(four, 2, "optimizer") == (4, into([2, 2]))
    assert smallest_period(four, into([2, 2])) is None
    assert partition(four, 2, "position") is None


@given(chains(), st.integers(1, 7), ESTIMATES)
@example(TIED, 2, "optimizer")
@settings(max_examples=examples(200))
def test_no_partition_that_is_allowed_is_better(some: Chain, devices: int, estimate: Estimate) -> None:
    allowed = [stages for stages in partitions(some.layers, devices) if _allowed(some, stages, devices, estimate)]
    expected = min((_busiest(some, stages) for stages in allowed), default=None)
    found = partition(some, devices, estimate)
    assert (None if found is None else found[0]) == expected
    if found:
        assert found[1] in allowed and _busiest(some, found[1]) == found[0]
        equal = [stages for stages in allowed if _busiest(some, stages) == expected]
        assert len(found[1]) == len(equal[0])  # the fewest stages stand first
        assert found[1][0].last == max(stages[0].last for stages in equal if len(stages) == len(equal[0]))


@given(chains(), st.integers(1, 7), ESTIMATES)
def test_the_least_memory_is_just_enough(some: Chain, devices: int, estimate: Estimate) -> None:
    least = least_memory(some, devices, estimate)
    assert partition(replace(some, memory=least), devices, estimate) is not None
    assert partition(replace(some, memory=least - 1), devices, estimate) is None


def _busiest(some: Chain, stages: tuple[Stage, ...]) -> int:
    loads = (some.loads[stage.last + 1] - some.loads[stage.first] for stage in stages)
    return max(*loads, *(some.busy(stage.first) for stage in stages), 0)


def _allowed(some: Chain, stages: tuple[Stage, ...], devices: int, estimate: Estimate) -> bool:
    for position, stage in enumerate(stages):
        own = slice(stage.first, stage.last + 1)
        bytes_of = {
            "optimizer": (sum(some.stored[own]) + _state(some, stage)) * (devices - 1 - position),
            "position": some.held(stage.first, stage.last, len(stages) - position),
            "devices": some.held(stage.first, stage.last, devices),
            "none": 0,
        }
        if bytes_of[estimate] > some.memory:
            return False
    return True


def _state(some: Chain, stage: Stage) -> int:
    """The bytes of a stage's state; what several of its layers share counts once."""
    layers = range(stage.first, stage.last + 1)
    of_shared = [(shared.bytes, sum(layer in layers for layer in shared.layers)) for shared in some.shared]
    return sum(some.state[n] for n in layers) - sum(size * (count - 1) for size, count in of_shared if count)
