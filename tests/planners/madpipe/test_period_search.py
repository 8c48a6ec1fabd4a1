"""The whole planner against the true optimum of small chains: any layer on any device, each a task of its own."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from planners.madpipe.period_search import SAME, SearchResult, least_period, search
from planners.madpipe.planner import Config
from planners.periodic.contiguous_partition import best
from planners.periodic.layer_ticks import Chain
from planners.periodic.min_memory import needed_bytes
from planners.periodic.reassign_devices import join_adjacent
from tests.planners.periodic.brute_force import allocations, check, optimum
from tests.planners.periodic.contiguous_cases import chain

OPTIONS = Config(atomic=True)


def numbers(some: random.Random, count: int, low: int, high: int) -> tuple[int, ...]:
    return tuple(some.randint(low, high) for _ in range(count))


def between(some: random.Random, layers: int, high: int) -> tuple[int, ...]:
    """What is at each cut between two layers; nothing at both ends."""
    return (0, *numbers(some, layers - 1, 0, high), 0)


def drawn(seed: int) -> tuple[Chain, int]:
    """A chain of up to 6 layers in which much fits exactly or just does not, and 2 or 3 devices."""
    some = random.Random(seed)
    layers = some.randint(2, 6)
    of_layers = [numbers(some, layers, low, high) for low, high in ((1, 3), (1, 3), (0, 2), (0, 4))]
    of_cuts = [between(some, layers, high) for high in (1, 1, 1)]
    memory, duplex = some.randint(2 * layers, 7 * layers), some.choice(("half", "full"))
    return Chain(*of_layers, *of_cuts, memory, duplex=duplex), some.randint(2, 3)


def hard(seed: int) -> tuple[Chain, int]:
    """A chain of 7 or 8 layers of up to 27 ticks, little memory, and 2 or 3 devices."""
    some = random.Random(1000 + seed)
    layers = some.randint(7, 8)
    of_layers = [numbers(some, layers, low, high) for low, high in ((1, 9), (1, 18), (0, 4), (1, 6))]
    of_cuts = [between(some, layers, high) for high in (3, 3, 2)]
    return Chain(*of_layers, *of_cuts, some.randint(3 * layers, 8 * layers)), some.randint(2, 3)


@pytest.mark.usefixtures("computation", "at_length")
def test_on_hard_chains_it_is_within_a_percent_of_the_optimum() -> None:
    """docs/howto/plan_a_pipeline.md says so: 1.006, and 1.031 of whole stages."""
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for seed in range(20):
        some, devices = hard(seed)
        true = optimum(some, devices)
        for atomic in (True, False) if true else ():
            found = search(some, devices, Config(atomic=atomic, limit_s=20.0))
            assert isinstance(found, SearchResult) and true
            check(found.timing)
            ratios[atomic].append(float(found.timing.period / true.period))
    whole, apart = (math.exp(sum(map(math.log, ones)) / len(ones)) for ones in ratios.values())
    assert len(ratios[True]) == 19 and 1 <= apart <= 1.01 < whole


@pytest.mark.usefixtures("computation")
@pytest.mark.parametrize("atomic", [True, False])
def test_never_below_the_optimum_and_near_it(atomic: bool) -> None:
    """At most 3 % above it on geometric average, 1 % by default, and never without a plan where there is one."""
    ratios = []
    for seed in range(60):
        some, devices = drawn(seed)
        true, found = optimum(some, devices), search(some, devices, Config(atomic=atomic))
        if true is None:
            assert isinstance(found, int) and best(some, devices) is None
            continue
        assert isinstance(found, SearchResult), f"seed {seed}: no plan where one has a period of {true.period}"
        check(found.timing)
        assert least_period(some, devices) <= true.period <= found.timing.period
        ratios.append(float(found.timing.period / true.period))
    assert len(ratios) > 50
    assert math.exp(sum(map(math.log, ratios)) / len(ratios)) <= (1.03 if atomic else 1.01)


def test_whole_stages_are_never_below_their_bound() -> None:
    for seed in range(60, 100):
        some, devices = drawn(seed)
        found, whole = search(some, devices, OPTIONS), best(some, devices)
        if isinstance(found, SearchResult) and whole is not None:
            assert found.contiguous and found.contiguous.period == whole[0] and found.timing.period <= whole[0]
            special = [stage.device for stage in found.timing.stages]
            if sum(special.count(device) > 1 for device in set(special)) <= 1 and found.least is not None:
                assert found.least <= found.timing.period


@pytest.mark.usefixtures("computation", "at_length")
def test_tasks_without_time_are_no_hole_in_memory() -> None:
    """Two tasks without time at one instant have two orders; a schedule that is made shorter may store more."""
    for seed in range(300):
        some, devices = drawn(seed)
        chosen = random.Random(seed)
        free = [chosen.random() < 0.4 for _ in range(some.layers)]
        work = [tuple(0 if no else t for no, t in zip(free, own, strict=True)) for own in (some.forward, some.backward)]
        if not any(work[0]):
            continue
        some = replace(some, forward=work[0], backward=work[1])
        for atomic in (True, False):
            found = search(some, devices, Config(atomic=atomic))
            assert isinstance(found, int) or max(found.timing.memory().values()) <= some.memory


def test_time_that_was_short_is_reported() -> None:
    some = drawn(7)[0]
    hurried = [search(drawn(seed)[0], 3, replace(OPTIONS, limit_s=1e-9)) for seed in range(40)]
    unfinished = [found for found in hurried if isinstance(found, SearchResult) and not found.finished]
    assert unfinished and all(found.least is None or found.timing.period > found.least for found in unfinished)
    patient = search(some, 2, OPTIONS)
    assert isinstance(patient, SearchResult) and patient.finished


def test_layers_apart_can_beat_every_schedule_of_whole_stages() -> None:
    """Layers 0 and 3 on a device, 1 and 2 on the other; tests/planners/periodic/test_milp.py has it solved."""
    ticks, cut = (3, 3, 2, 2), (0, 1, 0, 0, 0)
    some = Chain(ticks, tuple(2 * t for t in ticks), (0,) * 4, (2, 2, 2, 3), cut, cut, (0,) * 5, 7)
    whole, apart = (search(some, 2, Config(atomic=atomic)) for atomic in (True, False))
    assert isinstance(whole, SearchResult) and isinstance(apart, SearchResult)
    assert apart.timing.period == 15 and whole.timing.period >= 20
    assert apart.whole == whole.timing == whole.whole
    assert [stage.device for stage in apart.timing.stages] == [0, 1, 1, 0]


def test_the_published_search_stands_alone() -> None:
    some = chain([(2, 2), (3, 3), (2, 2), (3, 3)], memory=12)
    found = search(some, 3, Config(allocation="published"))
    assert isinstance(found, SearchResult) and found.contiguous is None and found.least is None
    check(found.timing)


def test_time_that_is_up_still_gives_the_best_consecutive_stages() -> None:
    for seed in range(20):
        some, devices = drawn(seed)
        whole, found = best(some, devices), search(some, devices, Config(limit_s=1e-9))
        if whole is not None:
            assert isinstance(found, SearchResult) and found.timing.period <= whole[0]


@pytest.mark.usefixtures("computation")
@pytest.mark.parametrize("atomic", [True, False])
def test_there_is_a_plan_in_the_least_memory_of_any_allocation(atomic: bool) -> None:
    """Whatever device has several stages; a byte less, and the search says how much is needed."""
    several = 0
    for seed in (*range(30), 130, 141, 251, 252, 297):
        some, devices = drawn(seed)
        least = min(needed_bytes(some, tuple(join_adjacent(layers))) for layers in allocations(some.layers, devices))
        found = search(replace(some, memory=least), devices, Config(atomic=atomic))
        assert isinstance(found, SearchResult), f"seed {seed}: no plan with {least} bytes"
        check(found.timing)
        assert search(replace(some, memory=least - 1), devices, Config(atomic=atomic)) == least
        several += found.least is None
    assert several, "no plan that needs two devices with several stages"


def test_of_equal_periods_consecutive_stages_are_taken() -> None:
    """With the last layer, of one tick, on the first device a period would be one tick shorter."""
    half = 2**40
    some = chain([(half, half - 1), (half, half), (1, 0)])
    found = search(some, 2, OPTIONS)
    assert isinstance(found, SearchResult) and found.contiguous is not None and found.least is not None
    assert found.least < found.contiguous.period < found.least * (1 + SAME)
    assert found.timing == found.contiguous
    assert [stage.device for stage in found.timing.stages] == [0, 1]


def test_no_schedule_is_shorter_than_what_no_schedule_can_beat() -> None:
    some = chain([(1, 1), (1, 1)], memory=10)
    assert least_period(some, 2) == 2, "the work of one device"
    tight = Chain((1, 1), (1, 1), (0, 0), (4, 1), (0,) * 3, (0,) * 3, (0,) * 3, 4)
    assert least_period(tight, 2) == 4, "layer 0 has room for one micro-batch, which is away for 4 ticks"
