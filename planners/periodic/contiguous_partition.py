"""The best partition into consecutive stages, each on a device of its own, under the memory that 1F1B* needs."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from itertools import pairwise

import numpy as np

from harness.core.plan import Stage
from planners.periodic.layer_ticks import Chain
from planners.periodic.one_f_one_b_star import delay_after, delay_after_message, groups, smallest_period
from planners.periodic.stage_ranges import NEVER, Spans, Whole


def best(chain: Chain, devices: int) -> tuple[int, tuple[Stage, ...]] | None:
    """Returns the shortest period, in whole ticks, of any partition into at most `devices` stages, and such a
    partition.

    Of equal ones it is one of the fewest stages, and of these one with the least memory on the fullest device.

    None if none fits into `chain.memory`. Any period is either proven too short by `Search.within`, or is that of a
    partition, whose own shortest period (`one_f_one_b_star.smallest_period`) is mostly far below the requested one:

        too short | ? ? ? ? ? ? ? ? ? ? | known to work
                lower    requested    upper              just below upper, or else in the middle
    """
    search = Search(chain, devices)
    longest = max(1, chain.loads[-1] + sum(chain.crossing))
    stages = search.within(longest)
    if stages is None:
        return None
    lower, upper, try_just_below = search.shortest, _period(chain, stages, longest), True
    while lower < upper:
        requested = upper - 1 if try_just_below else (lower + upper) // 2
        better = search.within(requested)
        if better is None:
            lower, try_just_below = requested + 1, False
        else:
            stages, upper, try_just_below = better, _period(chain, better, requested), not try_just_below
    return upper, _least_memory_partition(chain, devices, upper, stages)


def _least_memory_partition(chain: Chain, devices: int, period: int, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """Returns the partition with this period, and with as few stages, that needs the least memory on a device."""
    partition_for: dict[int, tuple[Stage, ...]] = {}

    def enough(memory: int) -> bool:
        fewer = Search(replace(chain, memory=memory), devices).within(period)
        if fewer is None or len(fewer) > len(stages):
            return False
        partition_for[memory] = fewer
        return True

    largest = max(
        chain.held(stage.first, stage.last, group)
        for stage, group in zip(stages, groups(chain, stages, period), strict=True)
    )
    sizes = range(least_memory(chain, devices), largest)
    smallest = bisect_left(sizes, True, key=enough)
    return partition_for[sizes[smallest]] if smallest < len(sizes) else stages


def least_memory(chain: Chain, devices: int) -> int:
    """Returns the fewest bytes of a device with which any partition into at most `devices` stages has a period.

    With a long period every stage stores one micro-batch, so this minimizes the largest stage.
    """
    spans = Spans.from_chain(chain)
    largest = np.full(chain.layers + 1, NEVER, dtype=np.int64)
    largest[-1] = 0
    for _ in range(min(devices, chain.layers)):
        of_span = np.maximum(spans.held(1), largest[spans.end])
        largest = np.minimum(largest, spans.least(of_span, len(largest)))
    return int(largest[0])


class Search:
    """Partitions of a chain into at most `devices` stages."""

    def __init__(self, chain: Chain, devices: int) -> None:
        self.chain, self.devices = chain, min(devices, chain.layers)
        spans = Spans.from_chain(chain)
        self.spans = spans.only(spans.held(1) <= chain.memory)
        most = (chain.memory - self.spans.held(0)) // np.maximum(self.spans.stored, 1)
        # no delay is longer than 4 periods for each device: a message takes at most two, a stage one, and one may wait
        self.most = np.where(self.spans.stored, most, NEVER).clip(max=4 * self.devices)
        self.crossing = np.array(chain.crossing, dtype=np.int64)
        self.busy = np.array([chain.busy(boundary) for boundary in range(chain.layers + 1)], dtype=np.int64)

    @property
    def shortest(self) -> int:
        """A lower bound of the period: that of the longest layer, or of all loads shared evenly."""
        loads = self.chain.loads
        longest = max(end - begin for begin, end in pairwise(loads))
        return max(1, longest, -(-loads[-1] // self.devices))

    def within(self, period: int) -> tuple[Stage, ...] | None:
        """Returns a partition of the fewest stages that has this period; None if there is none.

        From the end of the chain, the least delay (`one_f_one_b_star.delay_after`) of each boundary and number of
        stages:

            0 ... first ... end ............ L
                  |<-load-->|<- the least delay of one stage fewer, and the message at `end`
                  |<------- the least over all ends

        The least delay is enough: (+) grows with it, and with a longer delay a stage stores no less.
        """
        chosen = self.spans.load <= period
        spans, longest = self.spans.only(chosen), self.most[chosen] * period
        delays = np.full(self.chain.layers + 1, NEVER, dtype=np.int64)
        delays[-1] = 0
        steps = []
        for _ in range(self.devices):
            delay = delay_after(self._crossed(delays, period)[spans.end], spans.load, period)
            delay[delay > longest] = NEVER
            steps.append(delay)
            delays = spans.least(delay, len(delays))
            if delays[0] < NEVER:
                return spans.partition(steps)
        return None

    def _crossed(self, delays: Whole, period: int) -> Whole:
        """Returns `delay_after_message` at every boundary. The end of the chain sends nothing."""
        delayed = delay_after_message(self.chain.duplex, delays, self.crossing, period)
        return np.where((delays == NEVER) | (self.busy > period), NEVER, delayed)


def _period(chain: Chain, stages: tuple[Stage, ...], requested: int) -> int:
    period = smallest_period(chain, stages)
    assert period is not None and period <= requested
    return period
