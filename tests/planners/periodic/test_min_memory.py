from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core.plan import Stage
from planners.periodic import contiguous_partition
from planners.periodic.layer_ticks import Chain, Shared
from planners.periodic.milp import solve
from planners.periodic.min_memory import needed_bytes, pack_layers
from planners.periodic.reassign_devices import join_adjacent
from tests.planners.periodic.brute_force import allocations
from tests.planners.periodic.contiguous_cases import chain, chains, into
from tests.tiers import examples


@settings(max_examples=examples(60), deadline=None)
@given(chains(most=5, shortest=1), st.integers(1, 3))
def test_no_allocation_needs_less(some: Chain, devices: int) -> None:
    """Of layers that take time: what begins and ends in the same instant is never stored."""
    least = min(needed_bytes(some, tuple(join_adjacent(layers))) for layers in allocations(some.layers, devices))
    found, stages = pack_layers(replace(some, memory=0), devices, 20)
    assert found == needed_bytes(some, stages) == least
    assert {stage.device for stage in stages} <= set(range(devices))


@settings(max_examples=examples(30), deadline=None)
@given(chains(most=5, shortest=1), st.integers(1, 3))
def test_what_is_needed_is_enough_and_a_byte_less_is_not(some: Chain, devices: int) -> None:
    least, stages = pack_layers(replace(some, memory=0), devices, 20)
    assert solve(replace(some, memory=least), stages, 0).timing is not None
    assert solve(replace(some, memory=least - 1), stages, 0).timing is None
    assert pack_layers(replace(some, memory=least), devices, 20)[0] <= least


def test_two_devices_that_both_have_two_stages() -> None:
    """Bytes 4, 1, 3, 2 are in order 5 and 5; 4, 3, 1, 2 are in order at least 6, in turns 4 + 1 and 3 + 2."""
    some = replace(chain([(1, 1)] * 4), stored=(4, 1, 3, 2), memory=0)
    assert pack_layers(some, 2, 20) == (5, into([2, 2]))
    turns = replace(some, stored=(4, 3, 1, 2))
    assert contiguous_partition.least_memory(turns, 2) == 6
    found, stages = pack_layers(turns, 2, 20)
    assert found == 5 and len(stages) > 2


def test_what_is_shared_draws_layers_together() -> None:
    """The first and the last layer have 4 of 5 bytes in common: 1 + 4 + 1 on one device, 2 + 2 on the other."""
    some = replace(chain([(1, 1)] * 4), stored=(0,) * 4, state=(5, 2, 2, 5), shared=(Shared(4, (0, 3)),), memory=0)
    assert pack_layers(some, 2, 20) == (6, (Stage(0, 0, 0), Stage(1, 2, 1), Stage(3, 3, 0)))


def test_without_time_it_is_the_best_partition() -> None:
    turns = replace(chain([(1, 1)] * 4), stored=(4, 3, 1, 2), memory=5)
    found, stages = pack_layers(turns, 2, 0)
    assert found == 6 and stages == into([1, 3])
