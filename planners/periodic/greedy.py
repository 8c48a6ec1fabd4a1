"""A quick periodic schedule of any allocation: tasks are placed one by one, from the end of the network outwards."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from harness.plan import Stage
from planners.periodic.bounds import lower_bound, one_by_one
from planners.periodic.chain import Chain
from planners.periodic.retiming import laps_of, retimed
from planners.periodic.timing import Resource, Task, Timing, path

ROUNDS = 12
"""So often the interval of periods is halved."""


def quick(chain: Chain, stages: Sequence[Stage]) -> Timing | None:
    """A valid timing, good but not always the best; None if the devices have no room for one micro-batch.

    For one stage on each device and no shared link it is 1F1B*: a backward task, or a forward task, waits exactly where
    a new group begins.
    """
    least = lower_bound(chain, stages)
    if least is None:
        return None
    best = one_by_one(chain, stages)
    low, high = -(-least.numerator // least.denominator), int(best.period)
    period = low
    for _ in range(ROUNDS):
        found = min(_tries(chain, stages, period), key=lambda timing: timing.period, default=None)
        if found is not None:
            high = period
            best = min(best, found, key=lambda timing: timing.period)
        else:
            low = period + 1
        high = min(high, int(best.period))
        if best.period <= least or low >= high:
            break
        period = (low + high) // 2
    return best


def _tries(chain: Chain, stages: Sequence[Stage], period: int) -> list[Timing]:
    """What fits into memory of the schedules for this period, at the smallest period of their orders."""
    tasks = path(chain, stages)
    found = []
    for forward_first in (False, True):
        starts = _placed(tasks, period, forward_first)
        if starts is None:
            continue
        timing = Timing(chain, tuple(stages), Fraction(period), tuple(Fraction(start) for start in starts))
        if max(timing.memory().values()) <= chain.memory:
            sooner = retimed(chain, stages, laps_of(tasks, starts, period))
            fits = sooner is not None and max(sooner.memory().values()) <= chain.memory  # tasks without time may not
            found.append(sooner if sooner is not None and fits else timing)
    return found


def _placed(tasks: Sequence[Task], period: int, forward_first: bool) -> list[int] | None:
    """Starts: forward tasks as late as they can, backward tasks as early, from the middle of the path outwards.

        F0 -> sent1 -> F1 ->|-> B1 -> returned1 -> B0
                      <--- 0 1 --->                        the order of placing; `forward_first` has 0 and 1
                 <--- 2         3 --->                     of each pair exchanged

    None if a task finds no place. For a chain with a period in whole ticks.
    """
    half = len(tasks) // 2
    busy: dict[Resource, list[tuple[int, int]]] = {task.resource: [] for task in tasks}
    starts = [0] * len(tasks)
    first, last = 0, 0  # when what is placed begins and ends
    for step in range(half):
        pair = ((half - 1 - step, True), (half + step, False))
        for place, backwards in pair if forward_first else pair[::-1]:
            task = tasks[place]
            if backwards:  # time is turned round: what ends at e begins at -e
                turned = [(-end, -start) for start, end in busy[task.resource]]
                found = _free(turned, -first, task.ticks, period)
                start = None if found is None else -found - task.ticks
            else:
                start = _free(busy[task.resource], last, task.ticks, period)
            if start is None:
                return None
            starts[place] = start
            busy[task.resource].append((start, start + task.ticks))
            first, last = min(first, start), max(last, start + task.ticks)
    return [start - starts[0] for start in starts]


def _free(busy: Sequence[tuple[int, int]], earliest: int, ticks: int, period: int) -> int | None:
    """The earliest start at which a task of so many ticks runs into none of the busy times, repeated every period."""
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
