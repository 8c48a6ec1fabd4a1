"""The best partition into consecutive stages, each on a device of its own, under the memory that 1F1B* needs."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from itertools import pairwise

import numpy as np

from harness.plan import Stage
from planners.periodic.chain import Chain
from planners.periodic.groups import after, crossed, groups, smallest_period
from planners.periodic.spans import NEVER, Spans, Whole


def best(chain: Chain, devices: int) -> tuple[int, tuple[Stage, ...]] | None:
    """The shortest period, in whole ticks, of any partition into at most `devices` stages, and such a partition: of
    equal ones one of the fewest stages, and of these one with the least on the fullest device.

    None if none fits into `chain.memory`. Any period is either proven too short by `Search.within`, or is that of a
    partition, whose own shortest period (`groups.smallest_period`) is mostly far below what was asked for:

        too short | ? ? ? ? ? ? ? ? ? ? | known to work
                lower      asked      upper              just below upper, or else in the middle
    """
    search = Search(chain, devices)
    longest = max(1, chain.loads[-1] + sum(chain.crossing))
    found = search.within(longest)
    if found is None:
        return None
    lower, upper, below = search.shortest, _period(chain, found, longest), True
    while lower < upper:
        asked = upper - 1 if below else (lower + upper) // 2
        better = search.within(asked)
        if better is None:
            lower, below = asked + 1, False
        else:
            found, upper, below = better, _period(chain, better, asked), not below
    return upper, _roomiest(chain, devices, upper, found)


def _roomiest(chain: Chain, devices: int, period: int, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """The partition with this period, and with as few stages, for which devices may be smallest."""
    found: dict[int, tuple[Stage, ...]] = {}

    def enough(memory: int) -> bool:
        fewer = Search(replace(chain, memory=memory), devices).within(period)
        if fewer is None or len(fewer) > len(stages):
            return False
        found[memory] = fewer
        return True

    largest = max(
        chain.held(stage.first, stage.last, group)
        for stage, group in zip(stages, groups(chain, stages, period), strict=True)
    )
    sizes = range(least_memory(chain, devices), largest)
    smallest = bisect_left(sizes, True, key=enough)
    return found[sizes[smallest]] if smallest < len(sizes) else stages


def least_memory(chain: Chain, devices: int) -> int:
    """The fewest bytes of a device with which any partition into at most `devices` stages has a period.

    With a period that is long enough every stage stores one micro-batch, so the largest stage is made the least.
    """
    spans = Spans.of(chain)
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
        spans = Spans.of(chain)
        self.spans = spans.only(spans.held(1) <= chain.memory)
        most = (chain.memory - self.spans.held(0)) // np.maximum(self.spans.stored, 1)
        # no delay is longer than 4 periods for each device: a message takes at most two, a stage one, and one may wait
        self.most = np.where(self.spans.stored, most, NEVER).clip(max=4 * self.devices)
        self.crossing = np.array(chain.crossing, dtype=np.int64)
        self.busy = np.array([chain.busy(boundary) for boundary in range(chain.layers + 1)], dtype=np.int64)

    @property
    def shortest(self) -> int:
        """No period is shorter: that of the longest layer, or of all loads shared evenly."""
        loads = self.chain.loads
        longest = max(end - begin for begin, end in pairwise(loads))
        return max(1, longest, -(-loads[-1] // self.devices))

    def within(self, period: int) -> tuple[Stage, ...] | None:
        """A partition of the fewest stages that has this period; None if there is none.

        From the end of the chain, the least delay (`groups.after`) of each boundary and number of stages:

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
            delay = after(self._crossed(delays, period)[spans.end], spans.load, period)
            delay[delay > longest] = NEVER
            steps.append(delay)
            delays = spans.least(delay, len(delays))
            if delays[0] < NEVER:
                return spans.partition(steps)
        return None

    def _crossed(self, delays: Whole, period: int) -> Whole:
        """`groups.crossed` at every boundary. The end of the chain sends nothing."""
        found = crossed(self.chain.duplex, delays, self.crossing, period)
        return np.where((delays == NEVER) | (self.busy > period), NEVER, found)


def _period(chain: Chain, stages: tuple[Stage, ...], asked: int) -> int:
    period = smallest_period(chain, stages)
    assert period is not None and period <= asked
    return period
