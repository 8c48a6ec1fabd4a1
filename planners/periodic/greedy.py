"""A greedy periodic schedule of any allocation: places tasks one by one, from the end of the network outwards."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from harness.core.plan import Stage
from planners.periodic.bounds import lower_bound, sequential
from planners.periodic.layer_ticks import Chain
from planners.periodic.retiming import laps_from_starts, retime
from planners.periodic.task_times import Resource, Task, Timing, path

ROUNDS = 12
"""Bisection steps of the period."""


def quick(chain: Chain, stages: Sequence[Stage]) -> Timing | None:
    """Returns a valid timing, good but not always the best; None if the devices have no memory for one micro-batch.

    For one stage on each device and no shared link it is 1F1B*: a backward task, or a forward task, waits exactly where
    a new group begins.
    """
    least = lower_bound(chain, stages)
    if least is None:
        return None
    best = sequential(chain, stages)
    low, high = -(-least.numerator // least.denominator), int(best.period)
    period = low
    for _ in range(ROUNDS):
        timing = min(_candidates(chain, stages, period), key=lambda timing: timing.period, default=None)
        if timing is not None:
            high = period
            best = min(best, timing, key=lambda timing: timing.period)
        else:
            low = period + 1
        high = min(high, int(best.period))
        if best.period <= least or low >= high:
            break
        period = (low + high) // 2
    return best


def _candidates(chain: Chain, stages: Sequence[Stage], period: int) -> list[Timing]:
    """Returns the schedules for this period that fit into memory, at the smallest period of their orders."""
    tasks = path(chain, stages)
    timings = []
    for forward_first in (False, True):
        starts = _place_tasks(tasks, period, forward_first)
        if starts is None:
            continue
        timing = Timing(chain, tuple(stages), Fraction(period), tuple(Fraction(start) for start in starts))
        if max(timing.memory().values()) <= chain.memory:
            sooner = retime(chain, stages, laps_from_starts(tasks, starts, period))
            fits = (
                sooner is not None and max(sooner.memory().values()) <= chain.memory
            )  # tasks that take no time may not fit
            timings.append(sooner if sooner is not None and fits else timing)
    return timings


def _place_tasks(tasks: Sequence[Task], period: int, forward_first: bool) -> list[int] | None:
    """Returns starts: forward tasks as late as possible, backward tasks as early, from the middle of the path outwards.

        F0 -> sent1 -> F1 ->|-> B1 -> returned1 -> B0
                      <--- 0 1 --->                        the order of placing; `forward_first` has 0 and 1
                 <--- 2         3 --->                     of each pair exchanged

    None if a task has no free time. For a chain with a period in whole ticks.
    """
    half = len(tasks) // 2
    busy: dict[Resource, list[tuple[int, int]]] = {task.resource: [] for task in tasks}
    starts = [0] * len(tasks)
    first, last = 0, 0  # when what is placed begins and ends
    for step in range(half):
        pair = ((half - 1 - step, True), (half + step, False))
        for place, backwards in pair if forward_first else pair[::-1]:
            task = tasks[place]
            if backwards:  # time is reversed: what ends at e begins at -e
                reversed_busy = [(-end, -start) for start, end in busy[task.resource]]
                free_start = _free(reversed_busy, -first, task.ticks, period)
                start = None if free_start is None else -free_start - task.ticks
            else:
                start = _free(busy[task.resource], last, task.ticks, period)
            if start is None:
                return None
            starts[place] = start
            busy[task.resource].append((start, start + task.ticks))
            first, last = min(first, start), max(last, start + task.ticks)
    return [start - starts[0] for start in starts]


def _free(busy: Sequence[tuple[int, int]], earliest: int, ticks: int, period: int) -> int | None:
    """Returns the earliest start at which a task of `ticks` overlaps no busy time, repeated every period."""
    blocks = sorted(((start - earliest) % period, end - start) for start, end in busy)
    if not blocks:
        return earliest if ticks <= period else None
    over = blocks[-1][0] + blocks[-1][1] - period
    ends = [max(over, 0), *(start + length for start, length in blocks)]
    begins = [*(start for start, _ in blocks), period + blocks[0][0]]
    for end, begin in zip(ends, begins, strict=True):
        if end + ticks <= begin:
            return earliest + end
    return None
