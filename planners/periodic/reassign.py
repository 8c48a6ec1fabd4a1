"""Better places for the stages of a plan: what the second phase may change beside the schedule."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, pairwise

from harness.plan import Stage
from planners.periodic.bounds import lower_bound
from planners.periodic.chain import Chain
from planners.periodic.greedy import quick
from planners.periodic.program import solve
from planners.periodic.timing import Timing

SLICE_S = 2.0
"""One assignment gets at most so long a time."""

Allocation = tuple[Stage, ...]


def improved(chain: Chain, timing: Timing, devices: int, limit_s: float) -> tuple[Timing, bool]:
    """A valid timing that is at least as good, found by changing the assignment step by step; `timing` if none is; and
    whether the time was enough.

    A step is the first assignment with a smaller period among the neighbours (`neighbours`), in the order of what they
    cannot beat. All are scheduled quickly before any is solved. It ends where no neighbour is better, or the time is
    over; if it ends by itself, and no solution by its time, the answer is always the same.
    """
    end = time.monotonic() + limit_s
    tried: dict[Allocation, int] = {}
    best, enough = timing, True

    def solved(stages: Allocation) -> Timing | None:
        nonlocal enough
        left = min(end - time.monotonic(), SLICE_S)
        found = solve(chain, stages, left, best.period)
        enough &= found.finished
        return found.timing

    attempts: tuple[Callable[[Allocation], Timing | None], ...] = (lambda stages: quick(chain, stages), solved)
    better: Timing | None = best
    while better is not None:
        best = better
        around = _promising(chain, best, devices)
        better = None
        for number, attempt in enumerate(attempts):
            for stages in around:
                if better is not None or tried.get(stages, -1) >= number:
                    continue
                if time.monotonic() > end:
                    return best, False
                tried[stages] = number
                found = attempt(stages)
                better = found if found is not None and found.period < best.period else None
    return best, enough


def _promising(chain: Chain, timing: Timing, devices: int) -> list[Allocation]:
    """The neighbours that could have a smaller period, the most promising first."""
    bounded: dict[Allocation, Fraction] = {}
    for stages in neighbours(timing.stages, devices):
        if stages not in bounded:
            least = lower_bound(chain, stages)
            bounded[stages] = timing.period if least is None else least
    found = [stages for stages, least in bounded.items() if least < timing.period]
    return sorted(found, key=lambda stages: bounded[stages])


def neighbours(stages: Sequence[Stage], devices: int) -> Iterator[Allocation]:
    """Assignments that one change makes of this one; devices are alike, and numbered as the path meets them.

        A A A B B C C C        a stage moves       A A A A A C C C
                               two exchange        B B B A A C C C
                               a part moves        A A C B B C C C, also next door: A A B B B C C C

    Stages that meet on a device become one, unless some already were apart (`planners.periodic.program.layers_apart`).
    """
    apart = any(one.device == two.device for one, two in pairwise(stages))
    for changed in (*_moves(stages, devices), *_exchanges(stages), *_splits(stages, devices)):
        yield _named(changed if apart else joined(changed))


def _moves(stages: Sequence[Stage], devices: int) -> Iterator[list[Stage]]:
    for number, stage in enumerate(stages):
        for device in _others(stages, stage, devices):
            yield [*stages[:number], replace(stage, device=device), *stages[number + 1 :]]


def _exchanges(stages: Sequence[Stage]) -> Iterator[list[Stage]]:
    for one, two in combinations(range(len(stages)), 2):
        if stages[one].device != stages[two].device:
            changed = list(stages)
            changed[one] = replace(stages[one], device=stages[two].device)
            changed[two] = replace(stages[two], device=stages[one].device)
            yield changed


def _splits(stages: Sequence[Stage], devices: int) -> Iterator[list[Stage]]:
    for number, stage in enumerate(stages):
        for last in range(stage.first, stage.last):
            head, tail = replace(stage, last=last), replace(stage, first=last + 1)
            for device in _others(stages, stage, devices):
                yield [*stages[:number], replace(head, device=device), tail, *stages[number + 1 :]]
                yield [*stages[:number], head, replace(tail, device=device), *stages[number + 1 :]]


def _others(stages: Sequence[Stage], stage: Stage, devices: int) -> list[int]:
    """The devices that have something, but for the stage's own, and one that has nothing."""
    used = sorted({other.device for other in stages})
    free = [device for device in range(devices) if device not in used][:1]
    return [device for device in (*used, *free) if device != stage.device]


def joined(stages: Sequence[Stage]) -> list[Stage]:
    """The same, with adjacent stages of a device as one."""
    found: list[Stage] = []
    for stage in stages:
        if found and found[-1].device == stage.device:
            found[-1] = replace(found[-1], last=stage.last)
        else:
            found.append(stage)
    return found


def _named(stages: Sequence[Stage]) -> Allocation:
    names: dict[int, int] = {}
    return tuple(replace(stage, device=names.setdefault(stage.device, len(names))) for stage in stages)
