"""Moves stages of a plan to other devices: what the second phase may change in addition to the schedule."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, pairwise

from harness.core.plan import Stage
from planners.periodic.bounds import lower_bound
from planners.periodic.greedy import quick
from planners.periodic.layer_ticks import Chain
from planners.periodic.milp import solve
from planners.periodic.task_times import Timing, task_positions

SLICE_S = 2.0
"""The most seconds for one assignment."""

Allocation = tuple[Stage, ...]


def improve(chain: Chain, timing: Timing, devices: int, limit_s: float) -> tuple[Timing, bool]:
    """Local search over assignments: returns a valid timing that is at least as good, and whether the time was enough.

    A step is the first assignment with a smaller period among the `neighbours`, sorted by their lower bounds. All get a
    greedy schedule before any is solved. The search ends where no neighbour is better, or at the time limit; if no
    limit is reached, the result is deterministic.
    """
    end = time.monotonic() + limit_s
    tried: dict[Allocation, int] = {}
    best, enough = timing, True

    def solved(stages: Allocation) -> Timing | None:
        nonlocal enough
        left = min(end - time.monotonic(), SLICE_S)
        result = solve(chain, stages, left, best.period)
        enough &= result.finished
        return result.timing

    attempts: tuple[Callable[[Allocation], Timing | None], ...] = (lambda stages: quick(chain, stages), solved)
    better: Timing | None = best
    while better is not None:
        best = better
        around = _promising(chain, best, devices, end)
        if time.monotonic() > end:
            return best, False
        better = None
        for number, attempt in enumerate(attempts):
            for stages in around:
                if better is not None or tried.get(stages, -1) >= number:
                    continue
                if time.monotonic() > end:
                    return best, False
                tried[stages] = number
                result = attempt(stages)
                better = result if result is not None and result.period < best.period else None
    return best, enough


def _promising(chain: Chain, timing: Timing, devices: int, end: float) -> list[Allocation]:
    """Returns the neighbours that could have a smaller period, the most promising first: of those that are looked at
    before the time is up."""
    bounded: dict[Allocation, Fraction] = {}
    for stages in neighbours(timing.stages, devices):
        if time.monotonic() > end:
            break
        if stages not in bounded:
            least = lower_bound(chain, stages)
            bounded[stages] = timing.period if least is None else least
    promising = [stages for stages, least in bounded.items() if least < timing.period]
    return sorted(promising, key=lambda stages: bounded[stages])


def neighbours(stages: Sequence[Stage], devices: int) -> Iterator[Allocation]:
    """Yields the assignments that differ by one change; devices are equal, and numbered in the order of the path.

        A A A B B C C C        a stage moves       A A A A A C C C
                               two exchange        B B B A A C C C
                               a part moves        A A C B B C C C, also next door: A A B B B C C C

    Stages that meet on a device become one, unless some already were apart (`planners.periodic.milp.layers_apart`).
    """
    apart = any(stage.device == following.device for stage, following in pairwise(stages))
    for changed in (*_moves(stages, devices), *_exchanges(stages), *_splits(stages, devices)):
        yield _renumbered(changed if apart else join_adjacent(changed))


def _moves(stages: Sequence[Stage], devices: int) -> Iterator[list[Stage]]:
    for number, stage in enumerate(stages):
        for device in _others(stages, stage, devices):
            yield [*stages[:number], replace(stage, device=device), *stages[number + 1 :]]


def _exchanges(stages: Sequence[Stage]) -> Iterator[list[Stage]]:
    for first, second in combinations(range(len(stages)), 2):
        if stages[first].device != stages[second].device:
            changed = list(stages)
            changed[first] = replace(stages[first], device=stages[second].device)
            changed[second] = replace(stages[second], device=stages[first].device)
            yield changed


def _splits(stages: Sequence[Stage], devices: int) -> Iterator[list[Stage]]:
    for number, stage in enumerate(stages):
        for last in range(stage.first, stage.last):
            head, tail = replace(stage, last=last), replace(stage, first=last + 1)
            for device in _others(stages, stage, devices):
                yield [*stages[:number], replace(head, device=device), tail, *stages[number + 1 :]]
                yield [*stages[:number], head, replace(tail, device=device), *stages[number + 1 :]]


def _others(stages: Sequence[Stage], stage: Stage, devices: int) -> list[int]:
    """Returns the devices that have a stage, except the stage's own, and one that has none."""
    used = sorted({other.device for other in stages})
    free = [device for device in range(devices) if device not in used][:1]
    return [device for device in (*used, *free) if device != stage.device]


def join_adjacent(stages: Sequence[Stage]) -> list[Stage]:
    """Joins adjacent stages of a device."""
    joined: list[Stage] = []
    for stage in stages:
        if joined and joined[-1].device == stage.device:
            joined[-1] = replace(joined[-1], last=stage.last)
        else:
            joined.append(stage)
    return joined


def without_needless_cuts(timing: Timing) -> Timing:
    """Joins adjacent stages of a device that run one right after the other both ways, if that fits into its memory: the
    same tasks at the same times, and fewer of them.

        device 0   |F0|F1|  .  |B1|B0|    ->    |=F0=|  .  |=B0=|
    """
    number = 1
    while number < len(timing.stages):
        joined = _joined(timing, number)
        if joined is None:
            number += 1
        else:
            timing = joined
    return timing


def _joined(timing: Timing, number: int) -> Timing | None:
    """The timing with a stage as part of the one before it; None where that cannot be."""
    stages, starts, tasks = timing.stages, timing.starts, timing.tasks
    before, stage = stages[number - 1], stages[number]
    if before.device != stage.device:
        return None
    places = task_positions(tasks)
    keys = ((number - 1, "F"), (number, "F"), (number, "B"), (number - 1, "B"))
    f0, f1, b1, b0 = (places[key] for key in keys)
    for one, two in ((f0, f1), (b1, b0)):
        if starts[two] != starts[one] + tasks[one].ticks or _between(timing, one, two):
            return None
    whole = (*stages[: number - 1], replace(before, last=stage.last), *stages[number + 1 :])
    kept = tuple(start for place, start in enumerate(starts) if place not in (f1, b0))
    found = Timing(timing.chain, whole, timing.period, kept)
    return found if max(found.memory().values()) <= timing.chain.memory else None


def _between(timing: Timing, one: int, two: int) -> bool:
    """Whether another task of the device, one that takes no time, runs after task `one` and before task `two`."""
    moment, resource = timing.starts[two], timing.tasks[two].resource
    others = (place for place, task in enumerate(timing.tasks) if task.resource == resource and place not in (one, two))
    return any(
        not timing.tasks[place].ticks and (timing.starts[place] - moment) % timing.period == 0 for place in others
    )


def _renumbered(stages: Sequence[Stage]) -> Allocation:
    names: dict[int, int] = {}
    return tuple(replace(stage, device=names.setdefault(stage.device, len(names))) for stage in stages)
