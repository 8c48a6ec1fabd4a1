"""The shortest periodic schedule of an allocation, by an integer program (MadPipe, second phase; scipy's HiGHS).

The unknowns are lambda = 1 / T, s = t / T of each task, and the laps K of each pair of tasks that share a resource
(`planners.periodic.retiming`). Divided by T all that is asked for is linear, and no big number is needed:

    largest lambda with, for i < j on the path,
      s_next >= s_j + d_j lambda                                              the path
      K_ij + d_i lambda <= s_j - s_i <= K_ij + 1 - d_j lambda                 alone on a resource
      sum over stages of a device: stored * count + fixed <= memory           when each of its forward tasks starts

Laps are shifts and orders in one: K_ij = h_j - h_i - 1 + o_ij with s = x + h, 0 <= x < 1, and o_ij = 1 where x_i < x_j.
So a stage has stored, when forward task f starts, what has begun less what has ended, by laps alone:

    count = K(F, f) + K(f, B) + 1 if the stage is earlier on the path than f,    K(f, B) + 1 if f is its own,
            K(f, B) - K(f, F)     if it is later

Added, because they hold and help: no task waits a whole period for the one before it (else all that follow could start
a period earlier); K_ik - K_ij - K_jk is 0 or 1 (the cyclic order of three tasks); a device stores on average no more
than it has room for; laps are at least what the path itself takes; periods are below that of a quick schedule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, combinations, pairwise

from harness.plan import Stage
from planners.periodic.bounds import lower_bound, most, one_by_one, rooms, stored
from planners.periodic.chain import Chain
from planners.periodic.greedy import quick
from planners.periodic.integers import Row, minimized
from planners.periodic.retiming import retimed, sharing
from planners.periodic.timing import Task, Timing, ends_of, path

TOLERANCE = Fraction(1, 10**6)
"""The solver tells periods apart that differ by this part of them, no closer."""
ROOM = 1000
"""Memory is counted in thousandths of what a device has for activations: the solver's own tolerance is absolute."""


@dataclass(frozen=True)
class Solved:
    """What was found: the best `timing`, if any, and a period that no valid one is below.

    `finished`: the timing is the best (to `TOLERANCE`), or there is none; else time was up. Without a timing, `bound`
    is the period asked to stay below, or, for an allocation without memory for one micro-batch, the length of its path.
    """

    timing: Timing | None
    bound: Fraction
    finished: bool


def solve(chain: Chain, stages: Sequence[Stage], limit_s: float, below: Fraction | None = None) -> Solved:
    """The timing of these stages with the smallest period, if that is below `below`, within about `limit_s` seconds.

    Without `below` there always is a timing if each device has memory for one micro-batch, however short the time. A
    device may have any stages, also adjacent ones.
    """
    least = lower_bound(chain, stages)
    if least is None:
        return Solved(None, below or one_by_one(chain, stages).period, True)
    if below is not None and least >= below:
        return Solved(None, below, True)
    best = quick(chain, stages)
    if best is None or (below is not None and best.period >= below):
        best = None
    if best is not None and best.period <= least:
        return Solved(best, best.period, True)
    if limit_s <= 0:
        return Solved(best, least, False)
    limit = best.period if best is not None else below
    assert limit is not None
    found, dual, finished = _Program(chain, tuple(stages), least, limit).solved(limit_s)
    if found is not None and found.period < limit:
        best = found
    bound = (best.period if best is not None else limit) if finished else max(least, dual)
    return Solved(best, bound, finished)


def layers_apart(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Every layer a stage of its own, on the same device: so the layers of a stage need not run as one block.

    There is no message, and no buffer, between stages on one device.
    """
    return tuple(Stage(layer, layer, stage.device) for stage in stages for layer in range(stage.first, stage.last + 1))


@dataclass(frozen=True)
class _Program:
    """Timings with periods from `least` to below `limit`. Columns: lambda * load, s of each task, K of each pair."""

    chain: Chain
    stages: tuple[Stage, ...]
    least: Fraction
    limit: Fraction

    def solved(self, limit_s: float) -> tuple[Timing | None, Fraction, bool]:
        """The best timing that was found, if any, what no period is below, whether that is all there is to find."""
        low, high = self._bounds()
        rows = [*self._path(), *self._alone(), *self._orders(), *self._memory()]
        whole = [column > len(self.tasks) for column in range(len(low))]
        answer = minimized({0: -1.0}, rows, low, high, whole, limit_s)
        dual = self.least if not answer.mip_dual_bound else self.load / Fraction(-answer.mip_dual_bound)
        bound = min(max(dual * (1 - TOLERANCE), self.least), self.limit)
        if answer.x is None:
            return None, bound, answer.status == 2
        timing = retimed(self.chain, self.stages, {pair: round(answer.x[n]) for pair, n in self.columns.items()})
        if timing is None or max(timing.memory().values()) > self.chain.memory:
            return None, bound, False
        return timing, bound, answer.status == 0

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        return path(self.chain, self.stages)

    @cached_property
    def load(self) -> int:
        """The unit of time: what the busiest resource works in a period."""
        return max(sum(self.tasks[place].ticks for place in places) for places in sharing(self.tasks))

    @cached_property
    def ticks(self) -> list[float]:
        return [task.ticks / self.load for task in self.tasks]

    @cached_property
    def columns(self) -> dict[tuple[int, int], int]:
        pairs = [pair for places in sharing(self.tasks) for pair in combinations(places, 2)]
        return {pair: 1 + len(self.tasks) + number for number, pair in enumerate(pairs)}

    def _bounds(self) -> tuple[list[float], list[float]]:
        slowest = float(self.load / self.limit * (1 + TOLERANCE))
        tasks, before = len(self.tasks), [0.0, *accumulate(self.ticks)]
        low = [slowest, *[0.0] * tasks]
        high = [float(self.load / self.least), 0.0, *[math.inf] * (tasks - 1)]
        for i, j in self.columns:
            low.append(max(0.0, math.ceil((before[j + 1] - before[i]) * slowest - float(TOLERANCE)) - 1.0))
            high.append(math.inf)
        for number, limit in self.most.items():
            column = self.columns[self.places[number, "F"], self.places[number, "B"]]
            high[column] = min(high[column], limit - 1.0)
        return low, high

    @cached_property
    def places(self) -> dict[tuple[int, str], int]:
        return ends_of(self.tasks)

    @cached_property
    def room(self) -> dict[int, int]:
        return rooms(self.chain, self.stages)

    @cached_property
    def most(self) -> dict[int, int]:
        return most(self.chain, self.stages, self.room)

    def _path(self) -> Iterator[Row]:
        for i, j in pairwise(range(len(self.tasks))):
            yield {1 + j: 1.0, 1 + i: -1.0, 0: -self.ticks[i]}, 0.0, 1.0

    def _alone(self) -> Iterator[Row]:
        for (i, j), laps in self.columns.items():
            yield {1 + j: 1.0, 1 + i: -1.0, laps: -1.0, 0: -self.ticks[i]}, 0.0, math.inf
            yield {1 + j: 1.0, 1 + i: -1.0, laps: -1.0, 0: self.ticks[j]}, -math.inf, 1.0

    def _orders(self) -> Iterator[Row]:
        for places in sharing(self.tasks):
            for i, j, k in combinations(places, 3):
                yield {self.columns[i, k]: 1.0, self.columns[i, j]: -1.0, self.columns[j, k]: -1.0}, 0.0, 1.0

    def _memory(self) -> Iterator[Row]:
        """For devices with several stages; for one stage the bound on its laps says all."""
        for device, room in self.room.items():
            weights = {
                number: ROOM * stored(self.chain, stage) / room
                for number, stage in enumerate(self.stages)
                if stage.device == device and number in self.most
            }
            if len(weights) > 1:
                yield self._average(weights)
                yield from (self._moment(number, weights) for number in weights)

    def _average(self, weights: dict[int, float]) -> Row:
        row: dict[int, float] = dict.fromkeys([0], 0.0)
        for number, weight in weights.items():
            forward, backward = self.places[number, "F"], self.places[number, "B"]
            row |= {1 + backward: weight, 1 + forward: -weight}
            row[0] += weight * self.ticks[backward]
        return row, -math.inf, float(ROOM)

    def _moment(self, here: int, weights: dict[int, float]) -> Row:
        """What the device stores when the forward task of the stage `here` starts."""
        forward = self.places[here, "F"]
        row: dict[int, float] = {}
        sure = 0.0
        for number, weight in weights.items():
            row[self.columns[forward, self.places[number, "B"]]] = weight
            if number < here:
                row[self.columns[self.places[number, "F"], forward]] = weight
            elif number > here:
                row[self.columns[forward, self.places[number, "F"]]] = -weight
            sure += weight if number <= here else 0.0
        return row, -math.inf, ROOM - sure
