from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from hypothesis import given, settings

from harness.core.plan import Stage
from planners.periodic.bounds import sequential
from planners.periodic.layer_ticks import Chain
from planners.periodic.milp import solve
from planners.periodic.reassign_devices import improve, join_adjacent, neighbours, without_needless_cuts
from planners.periodic.task_times import Timing
from tests.planners.periodic.brute_force import chains, check, optimum
from tests.tiers import examples


def named(allocations: list[tuple[Stage, ...]]) -> set[str]:
    """Each allocation as the devices of its layers: "AAB"."""
    return {"".join("ABCD"[stage.device] * stage.layers for stage in stages) for stages in allocations}


def test_the_neighbours_of_two_stages() -> None:
    """A stage moves (AAAA), two exchange (AABB, named by the path), a part moves."""
    found = list(neighbours((Stage(0, 1, 0), Stage(2, 3, 1)), 2))
    assert named(found) == {"AAAA", "AABB", "ABBB", "ABAA", "AABA", "AAAB"}


def test_a_third_device_is_tried_once() -> None:
    assert "ABCC" in named(list(neighbours((Stage(0, 1, 0), Stage(2, 3, 1)), 4)))
    assert named(list(neighbours((Stage(0, 1, 0),), 3))) == {"AA", "AB"}


def test_stages_that_meet_become_one_unless_some_were_apart() -> None:
    stages = (Stage(0, 0, 0), Stage(1, 1, 1), Stage(2, 2, 0))
    assert join_adjacent((Stage(0, 0, 0), Stage(1, 1, 0), Stage(2, 2, 1))) == [Stage(0, 1, 0), Stage(2, 2, 1)]
    assert (Stage(0, 2, 0),) in set(neighbours(stages, 2))
    apart = (Stage(0, 0, 0), Stage(1, 1, 0), Stage(2, 2, 1))
    assert tuple(Stage(n, n, 0) for n in range(3)) in set(neighbours(apart, 2))


def test_two_stages_of_a_device_are_balanced() -> None:
    """All on one device takes 12 ticks; two devices can share them evenly."""
    nothing = (0,) * 5
    chain = Chain((1, 1, 1, 1), (2, 2, 2, 2), (0,) * 4, (1,) * 4, nothing, nothing, nothing, 100)
    start = sequential(chain, (Stage(0, 3, 0),))
    found, enough = improve(chain, start, 2, 20)
    check(found)
    assert found.period == 6
    assert enough and improve(chain, start, 2, 20) == (found, True)
    assert improve(chain, start, 1, 20) == (start, True)
    assert improve(chain, start, 2, 0) == (start, False)


@settings(max_examples=examples(15), deadline=None)
@given(chains(5, 4, 2))
def test_it_is_valid_never_worse_and_never_below_the_optimum(chain: Chain) -> None:
    stages = (Stage(0, 1, 0), Stage(2, 4, 1))
    start = solve(chain, stages, 10).timing
    if start is None:
        return
    found, _ = improve(chain, start, 3, 5)
    check(found)
    best = optimum(chain, 3)
    assert best is not None
    assert best.period <= found.period <= start.period


def test_stages_that_run_one_right_after_the_other_are_one() -> None:
    """Of three on a device, the first two in both directions; and only if their activations, from the first one's start
    on, fit."""
    nothing = (0,) * 4
    some = Chain((1, 1, 1), (2, 2, 2), (0,) * 3, (1, 1, 1), nothing, nothing, nothing, 3)
    stages = (Stage(0, 0, 0), Stage(1, 1, 0), Stage(2, 2, 0))
    timing = Timing(some, stages, Fraction(10), tuple(map(Fraction, (0, 1, 3, 4, 6, 8))))
    found = without_needless_cuts(timing)
    check(found)
    assert found.stages == (Stage(0, 1, 0), Stage(2, 2, 0)) and found.starts == (0, 3, 4, 6)
    late = replace(timing, starts=tuple(map(Fraction, (0, 2, 3, 4, 6, 9))))
    assert without_needless_cuts(late).stages == (Stage(0, 0, 0), Stage(1, 2, 0))
    full = replace(timing, chain=replace(some, memory=2))
    assert without_needless_cuts(full) == full
    two = replace(timing, stages=(Stage(0, 0, 0), Stage(1, 1, 1), Stage(2, 2, 0)))
    assert without_needless_cuts(two) == two


def test_stages_are_not_one_where_a_task_without_time_runs_between_them() -> None:
    """That of stage 2 runs on the same device when F0 ends and F1 begins, in the period before."""
    nothing = (0,) * 4
    some = Chain((1, 1, 0), (2, 2, 2), (0,) * 3, (1, 1, 1), nothing, nothing, nothing, 9)
    stages = (Stage(0, 0, 0), Stage(1, 1, 0), Stage(2, 2, 0))
    timing = Timing(some, stages, Fraction(10), tuple(map(Fraction, (0, 1, 11, 12, 14, 16))))
    check(timing)
    assert without_needless_cuts(timing).stages == stages
    later = replace(timing, starts=tuple(map(Fraction, (0, 1, 12, 12, 14, 16))))
    assert without_needless_cuts(later).stages == (Stage(0, 1, 0), Stage(2, 2, 0))
