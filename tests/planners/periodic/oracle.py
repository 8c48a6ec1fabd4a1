"""The best that there is, by trying all: what planners of small chains are measured against. For tests only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations
from math import inf

from hypothesis import strategies as st

from harness.plan import Stage
from planners.periodic.bounds import lower_bound, rooms, stored
from planners.periodic.chain import Chain
from planners.periodic.program import solve
from planners.periodic.reassign import joined
from planners.periodic.retiming import sharing
from planners.periodic.timing import Timing, path


@st.composite
def chains(draw: st.DrawFn, layers: int, longest: int = 3, messages: int = 1) -> Chain:
    """Chains of so many layers with few ticks and bytes, so that much fits exactly or just does not."""

    def numbers(low: int, high: int, count: int = layers) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(low, high), min_size=count, max_size=count)))

    return Chain(
        forward=numbers(1, longest),
        backward=numbers(1, longest),
        state=numbers(0, 2),
        stored=numbers(0, 4),
        sent=(0, *numbers(0, messages, layers - 1), 0),
        returned=(0, *numbers(0, messages, layers - 1), 0),
        buffers=(0, *numbers(0, 1, layers - 1), 0),
        memory=draw(st.integers(2 * layers, 7 * layers)),
        duplex=draw(st.sampled_from(("half", "full"))),
    )


def check(timing: Timing) -> None:
    """That a timing is what it must be, from the definitions alone."""
    tasks, starts, period = timing.tasks, timing.starts, timing.period
    assert len(tasks) == len(starts)
    for here, task in enumerate(tasks[:-1]):
        assert starts[here + 1] >= starts[here] + task.ticks
    for places in sharing(tasks):
        for one, two in combinations(places, 2):
            assert _apart(starts[one], tasks[one].ticks, starts[two], tasks[two].ticks, period), (one, two)
        assert sum(tasks[place].ticks for place in places) <= period
    assert max(timing.memory().values()) <= timing.chain.memory


def allocations(layers: int, devices: int) -> Iterator[tuple[Stage, ...]]:
    """All ways to put layers on at most so many alike devices; every layer is a stage of its own."""

    def rest(chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(chosen) == layers:
            yield chosen
            return
        for device in range(min(max(chosen, default=-1) + 2, devices)):
            yield from rest((*chosen, device))

    for where in rest(()):
        yield tuple(Stage(layer, layer, device) for layer, device in enumerate(where))


def optimum(chain: Chain, devices: int, whole: bool = False) -> Timing | None:
    """The valid timing with the smallest period of all: any layer on any device, each layer a task of its own.

    With `whole` adjacent layers on a device run as one block. None if nothing fits.
    """
    bounded: list[tuple[Fraction, int, tuple[Stage, ...]]] = []
    for layers in allocations(chain.layers, devices):
        stages = tuple(joined(layers)) if whole else layers
        least = lower_bound(chain, stages)
        if least is not None:
            bounded.append((least, len(bounded), stages))
    best: Timing | None = None
    for least, _, stages in sorted(bounded):
        if best is not None and least >= best.period:
            break
        found = solve(chain, stages, inf, None if best is None else best.period).timing
        best = found or best
    return best


def shortest(chain: Chain, stages: Sequence[Stage]) -> Fraction | None:
    """The smallest period of these stages, without any program: periods are tried, and at each all starts.

    A smallest period is the ratio of a cycle of differences: some of the tasks' ticks over a number of periods. So the
    ticks are at most those of all tasks, starts are multiples of a tick over that number, and no period is below what
    the busiest resource works. A longer period is never worse (all starts grow with it), so that halving finds it.
    Only for very few ticks.
    """
    tasks = path(chain, stages)
    total = sum(task.ticks for task in tasks)
    load = max(sum(tasks[place].ticks for place in places) for places in sharing(tasks))
    numbers = range(1, total // load + 1)
    periods = sorted({Fraction(ticks, n) for n in numbers for ticks in range(load * n, total + 1)})
    low, high = 0, len(periods)
    while low < high:
        middle = (low + high) // 2
        if _possible(chain, stages, periods[middle]):
            high = middle
        else:
            low = middle + 1
    return periods[low] if low < len(periods) else None


def _possible(chain: Chain, stages: Sequence[Stage], period: Fraction) -> bool:
    """Whether there are valid starts, in whole parts of a tick such that the period is whole, too."""
    tasks = path(chain, stages)
    parts, length = period.denominator, period.numerator
    room = rooms(chain, stages)
    left = [parts * sum(task.ticks for task in tasks[place:]) for place in range(len(tasks) + 1)]
    ends = {task.stage: place for place, task in enumerate(tasks) if task.kind == "B"}
    starts: list[int] = []

    def late(end: int) -> bool:
        """Whether, even if nobody waits from here on, a stage stores too much, or a device on average."""
        areas = dict.fromkeys(room, 0)
        for place, start in enumerate(starts):
            task = tasks[place]
            backward = ends[task.stage]
            size = stored(chain, stages[task.stage])
            if task.kind == "F" and size:
                if backward >= len(starts):
                    least = end + left[len(starts)] - left[backward + 1] - start
                else:
                    least = starts[backward] + parts * tasks[backward].ticks - start
                if least > room[stages[task.stage].device] // size * length:
                    return True
                areas[task.resource[0]] += least * size
        return any(area > room[device] * length for device, area in areas.items())

    def place_next(ready: int) -> bool:
        here = len(starts)
        if here == len(tasks):
            timing = Timing(chain, tuple(stages), period, tuple(Fraction(start, parts) for start in starts))
            return max(timing.memory().values()) <= chain.memory
        size = parts * tasks[here].ticks
        busy = [
            (start, parts * tasks[place].ticks)
            for place, start in enumerate(starts)
            if tasks[place].resource == tasks[here].resource
        ]
        for start in range(ready, ready + length if here else ready + 1):
            if late(start):
                break
            if all(_apart(start, size, other, taken, length) for other, taken in busy):
                starts.append(start)
                if place_next(start + size):
                    return True
                starts.pop()
        return False

    return place_next(0)


Ticks = int | Fraction


def _apart(start: Ticks, size: int, other: Ticks, taken: int, length: Ticks) -> bool:
    """Whether two tasks, repeated every `length`, never overlap."""
    return ((start - other) % length >= taken and (other - start) % length >= size) or (
        (start - other) % length == 0 and min(size, taken) == 0
    )
