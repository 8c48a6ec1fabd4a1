"""1F1B* (MadPipe, section 4.1): the periodic schedule of consecutive stages that stores the fewest activations."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, TypeVar

from harness.core.cluster import Duplex
from harness.core.plan import Stage
from planners.periodic.layer_ticks import Chain
from planners.periodic.task_times import Timing

if TYPE_CHECKING:
    from planners.periodic.stage_ranges import Whole

Ticks = TypeVar("Ticks", int, "Whole")
"""A number of ticks, or an array of them."""


def delay_after(delay: Ticks, load: Ticks, period: int) -> Ticks:
    """Returns x (+) y of the paper (4.2.1): the delay after an item of `load` ticks, at most `period`, is added to it.

    The delay of an item is the time from the start of a micro-batch's forward part to the end of its backward part.
    Time is divided into groups of one period each, and no item spans two of them:

        group         |<------ 2 ------>|<------ 1 ------>|
        fits                       [ y ][  x              ]     x + y
        does not fit           [ y ]    |    [  x         ]     g T + y

    It grows with x: where x <= x', x (+) y <= x' (+) y. In one group, x + y fits wherever x' + y does. If x' is in a
    later one than g, that of x, x (+) y is at most g T + y < x' + y. So is y (+) of the smaller y the smaller one, and
    in units of T both shrink as T grows: whatever fits with a period fits with every longer one.
    """
    waiting = group_of(delay, period) * period - delay
    return delay + load + waiting * (load > waiting)


def group_of(delay: Ticks, period: int) -> Ticks:
    """Returns the group in which a delay ends, 1 for the last stages: the number of stored micro-batches (Prop. 1)."""
    return (delay + (delay == 0) - 1) // period + 1


def delay_after_message(duplex: Duplex, delay: Ticks, crossing: Ticks, period: int) -> Ticks:
    """Returns the delay after a message that takes `crossing` ticks, with its gradient, is added to it.

    On a half duplex link they are an item like a stage. On a full duplex link they do not meet, so they may span
    groups, and only take time.
    """
    return delay_after(delay, crossing, period) if duplex == "half" else delay + crossing


def groups(chain: Chain, stages: Sequence[Stage], period: int) -> tuple[int, ...]:
    """Returns for each stage the micro-batches that 1F1B* stores. Stages are consecutive, one on each device."""
    return tuple(group_of(delay, period) for delay in _delays(chain, stages, period)[::2])


def smallest_period(chain: Chain, stages: Sequence[Stage]) -> int | None:
    """Returns the shortest period, in whole ticks, with which every stage fits into `chain.memory`; None if there is
    none.

    On half duplex links no period between two ticks is shorter: groups change only where the sum of consecutive items
    is the period. What fits with a period fits with every longer one (`delay_after`), so bisection finds the first.
    """
    longest = chain.loads[-1] + sum(chain.crossing)
    shortest = _busiest(chain, stages)
    if any(chain.held(stage.first, stage.last, 1) > chain.memory for stage in stages):
        return None

    def fits(period: int) -> bool:
        stored = groups(chain, stages, period)
        return all(
            chain.held(stage.first, stage.last, g) <= chain.memory for stage, g in zip(stages, stored, strict=True)
        )

    periods = range(shortest, max(shortest, longest))
    return shortest + bisect_left(periods, True, key=fits)


def timing(chain: Chain, stages: Sequence[Stage], period: int) -> Timing:
    """Returns the timing of 1F1B*: forward parts run back to back; the part of an item with delay V and load U ends V -
    U before its backward part begins.

    Four stages with F = B = 1 and T = 5; c and d are group 1, a and b group 2. Backward parts of group g begin
    (g - 1) T after the end of the group's forward parts:

        tick    0  1  2  3  4  5  6  7  8  9
        a       F           |           B           V = 9 - 0
        b          F        |        B              V = 8 - 1 = 2 + 5: its forward ends at 2, its backward begins at 7
        c             F     |  B
        d                F  B

    Nothing overlaps: V - U is between (g - 1) T and g T - U (`delay_after`). So the backward part begins, modulo T, at
    most T - U after the end of the forward part, and ends before the next forward part begins. Nothing is early: with x
    the delay of the following item, V >= x + U, so that the backward part begins not before the following one has
    ended. Stored are V / T micro-batches, rounded up: g. No other periodic schedule stores fewer on any stage (Prop.
    1): if x is at least as long there, V is at least x + U, and V - U is, modulo T, at most T - U, or the parts would
    overlap. The least such V is x (+) U, which grows with x.

    Raises ValueError for a period in which a device or a link is busy for longer.
    """
    if period < (busiest := _busiest(chain, stages)):
        raise ValueError(f"the period is {period} ticks, a device or link is busy for {busiest} of them")
    forward_starts: list[int] = []
    backward_starts: list[int] = []
    clock = 0
    for place, delay in enumerate(_delays(chain, stages, period)):
        stage = stages[(place + 1) // 2]
        if place % 2:
            forward, backward = chain.sent[stage.first], chain.returned[stage.first]
        else:
            forward, backward = (sum(ticks[stage.first : stage.last + 1]) for ticks in (chain.forward, chain.backward))
        forward_starts.append(clock)
        backward_starts.append(clock + delay - backward)
        clock += forward
    starts = tuple(Fraction(start) for start in (*forward_starts, *reversed(backward_starts)))
    return Timing(chain, tuple(stages), Fraction(period), starts)


def _delays(chain: Chain, stages: Sequence[Stage], period: int) -> list[int]:
    """Returns the delays of all items in order: stage, message, stage, ..., stage."""
    delays: list[int] = []
    delay = 0
    for number in range(len(stages) - 1, -1, -1):
        stage = stages[number]
        delay = delay_after(delay, chain.loads[stage.last + 1] - chain.loads[stage.first], period)
        delays.append(delay)
        if number:
            delay = delay_after_message(chain.duplex, delay, chain.crossing[stage.first], period)
            delays.append(delay)
    return delays[::-1]


def _busiest(chain: Chain, stages: Sequence[Stage]) -> int:
    """Returns the ticks for which the busiest device or link is busy in each period; at least one."""
    loads = (chain.loads[stage.last + 1] - chain.loads[stage.first] for stage in stages)
    return max(1, *loads, *(chain.busy(stage.first) for stage in stages[1:]))
