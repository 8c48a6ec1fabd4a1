"""The search within a limit of bytes, label by label, between a bound from below and one from above.

    labels of place i  --(seconds, bytes) of a way-->  labels of place j, less those that another one dominates,
                                                       less those that cannot end below the bound from above

With a price of a byte the cheapest way bounds what is still to come from below: seconds + price x (bytes - limit). What
is above is guessed, little at first; where nothing is found it was too little. Seconds are counted in shares of 2**-48
of a route that is known, bytes in about such shares of the limit. What is found is the best but for a share of CLOSE.
"""

from __future__ import annotations

from dataclasses import replace
from math import frexp
from typing import NamedTuple

import numpy as np

from harness.sbp.costs import INFINITE
from harness.sbp.edges import Edges
from harness.sbp.frontier import Frontier
from harness.sbp.labels import Labels
from harness.sbp.optimum import Search
from harness.sbp.route import Route, Steps
from harness.sbp.stages import Ahead, Stages

CLOSE = 1e-11
"""Share by which sums of rounded numbers may differ."""
FINE = 48
"""Bits of the seconds of a known route, and of the limit."""
PRICES = (1.0, 0.95, 1.05)
"""Prices that bound, as shares of the best one: those beside it bound ways that have taken too little or too much."""
FIRST, WIDER = 2.0**-14, 4
"""The first guess as a share of what is between the bounds; how many times as wide the next one is."""


class Lane(NamedTuple):
    """Ways with the same `end`, which enter the repeated blocks, if there are such, in the same place."""

    entered: int
    end: int


class Between:
    """Ways begin with the labels of `starts`, one set of them for each end, and end at what `ends` adds (places, ends).

    If the first and the last product share a weight, an end is the place from which the middle leaves and to which it
    comes back; else there is one. `best` is a route within the limit. The best price bounds most closely.
    """

    def __init__(self, search: Search, limit: float, price: float, best: Route) -> None:
        self.search, self.best = search, best
        self.second, self.byte = best.seconds * 2.0**-FINE, 2.0 ** (frexp(limit)[1] - 1 - FINE)
        self.limit, self.rate = limit / self.byte * (1 + CLOSE), price * self.byte / self.second
        self.loops, end = search.loops() if search.ties() else [], search.end().seconds
        places = np.arange(len(end))
        if self.loops:
            self.ends = np.where(places[:, None] == places, 0.0, INFINITE)
            self.starts = [self._begun(int(place), end) for place in places]
        else:
            self.ends = end
            self.starts = [self._labels(places, search.start().seconds[0], np.zeros(len(places)), places)]
        self.stages = Stages(search)
        self.ahead = [Ahead(self.stages, self.ends, share * price, 1.0, self.second) for share in PRICES]
        self.small = Ahead(self.stages, self.ends, 1.0, 0.0, self.byte)
        self.frontier, self.around = Frontier(search, price), self._around()

    def route(self) -> Route:
        """The cheapest route within the limit."""
        lanes = sorted(
            (self._least(labels, Lane(entered, end)), Lane(entered, end))
            for entered in self.stages.entrances
            for end, labels in enumerate(self.starts)
        )
        below = lanes[0][0] - self.rate * self.limit
        gap = FIRST * (self._above() - below)
        while True:
            bound = below + gap if below + 2 * gap < self._above() else self._above()
            ways = self._ways(bound)
            for least, lane in lanes:
                if least - self.rate * self.limit < min(bound, self._above()):
                    self._follow(lane, self._stages(ways, lane.entered), min(bound, self._above()))
            if self._above() <= bound:
                return self.best
            gap *= WIDER

    def _least(self, labels: Labels, lane: Lane) -> float:
        """Seconds, and the price of all bytes, of the cheapest route in a lane."""
        ahead = self.ahead[0].before(lane.entered)[0][labels.place, lane.end]
        return float((labels.seconds + self.rate * labels.bytes + ahead).min(initial=INFINITE))

    def _above(self) -> float:
        """Seconds, in units, that are less than those of the best route."""
        return self.best.seconds / self.second * (1 - CLOSE)

    # -- in units -------------------------------------------------------------------------------------------------

    def _around(self) -> list[np.ndarray]:
        """Seconds, and the price of all bytes, of the cheapest route by each way of a section, less that way itself."""
        begun = np.full(self.ends.shape, INFINITE)
        for end, labels in enumerate(self.starts):
            np.minimum.at(begun[:, end], labels.place, labels.seconds + self.rate * labels.bytes)
        return self.ahead[0].around(begun)

    def _ways(self, bound: float) -> list[Edges]:
        """Of each section those by which a route may end below the bound, as often as it is counted."""
        sections, counts = self.stages.sections, self.stages.times
        keys = [(self.search.key(section), times) for section, times in zip(sections, counts, strict=True)]
        least, ways = dict[object, np.ndarray](), dict[object, Edges]()
        for key, around in zip(keys, self.around, strict=True):
            least[key] = np.minimum(least.get(key, INFINITE), around)
        for key, section, times in zip(keys, sections, counts, strict=True):
            if key not in ways:
                room = (bound + self.rate * self.limit - least[key]) * self.second / times
                ways[key] = self._edges(self.frontier.edges(section, room), times)
        return [ways[key] for key in keys]

    def _edges(self, edges: Edges, times: int = 1) -> Edges:
        seconds, bytes_, few = self._units(times * edges.seconds, times * edges.bytes)
        return replace(edges.taken(few), seconds=seconds, bytes=bytes_)

    def _labels(self, place: np.ndarray, seconds: np.ndarray, bytes_: np.ndarray, number: np.ndarray) -> Labels:
        """Of ways that begin here, each with a number instead of the edge by which it came."""
        seconds, bytes_, few = self._units(seconds, bytes_)
        return Labels(place[few], seconds, bytes_, number[few], number[few])

    def _units(self, seconds: np.ndarray, bytes_: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Integers, without those that are too many for any route; the numbers of the others."""
        few = np.flatnonzero((seconds <= self.best.seconds) & (bytes_ <= self.limit * self.byte))
        seconds, bytes_ = np.rint(seconds[few] / self.second), np.rint(bytes_[few] / self.byte)
        return seconds.astype(np.int64), bytes_.astype(np.int64), few

    def _begun(self, place: int, end: np.ndarray) -> Labels:
        """The loops that begin at a place, with what is behind them."""
        mine = [(number, loop) for number, loop in enumerate(self.loops) if loop.at == place]
        seconds = np.array([loop.seconds + end[loop.to, 0] for _, loop in mine])
        numbers = np.array([number for number, _ in mine], dtype=np.int64)
        return self._labels(np.full(len(mine), place), seconds, np.array([loop.bytes for _, loop in mine]), numbers)

    # -- one part after the other ---------------------------------------------------------------------------------

    def _follow(self, lane: Lane, stages: list[Edges], bound: float) -> None:
        """Find the best way of a lane that takes less than the bound, if there is one, or some way that fits."""
        labels = begun = self._cut(self.starts[lane.end], 0, lane, bound)
        came: list[tuple[np.ndarray, np.ndarray]] = []
        for number, ways in enumerate(stages, start=1):
            if not len(labels.place):
                return
            labels = self._cut(labels.along(ways, self._useful(labels, ways, number, lane, bound)), number, lane, bound)
            came.append((labels.before.astype(np.int32), labels.edge.astype(np.int32)))
        seconds = labels.seconds * self.second + self.ends[labels.place, lane.end]
        if seconds.min(initial=INFINITE) >= self.best.seconds:
            return
        at = int(seconds.argmin())
        last, total, steps = int(labels.place[at]), float(seconds[at]), list[Steps]()
        for ways, (before, edge) in zip(reversed(stages), reversed(came), strict=True):
            steps.append(ways.steps(int(edge[at])))
            at = int(before[at])
        between = self.stages.unrolled(steps[::-1])
        self.best = Route(self.search.named(self._whole(int(begun.edge[at]), between, last)), total)

    def _stages(self, ways: list[Edges], entered: int) -> list[Edges]:
        """With what happens between repeated blocks, behind one of them."""
        end = self.stages.end
        return [*ways[:end], self._edges(self.stages.back(entered)), *ways[end:]] if end else ways

    def _whole(self, begun: int, steps: Steps, last: int) -> Steps:
        """With what is before and behind: the loop of this number, or what brings the input to the place of it."""
        start, end = self.search.start(), self.search.end()
        if self.loops:
            loop = self.loops[begun]
            return [loop.head, *steps, loop.tail, *end.steps(loop.to, 0)]
        return [*start.steps(0, begun), *steps, *end.steps(last, 0)]

    def _useful(self, labels: Labels, ways: Edges, number: int, lane: Lane, bound: float) -> np.ndarray:
        """The numbers of the ways to a stage by which some label may end below the bound."""
        least = np.full(len(self.ends), INFINITE)
        np.minimum.at(least, labels.place, labels.seconds + self.rate * labels.bytes)
        ahead = self.ahead[0].before(lane.entered)[number][ways.target, lane.end]
        through = least[ways.source] + ways.seconds + self.rate * ways.bytes + ahead
        return np.flatnonzero(through < bound + self.rate * self.limit)

    def _cut(self, labels: Labels, number: int, lane: Lane, bound: float) -> Labels:
        """Without those that cannot fit, or cannot end below the bound."""
        small = self.small.before(lane.entered)[number][labels.place, lane.end]
        good = labels.bytes + small <= self.limit
        for share, ahead in zip(PRICES, self.ahead, strict=True):
            rate = share * self.rate
            total = labels.seconds + rate * labels.bytes + ahead.before(lane.entered)[number][labels.place, lane.end]
            good &= total < bound + rate * self.limit
        return labels.taken(good)
