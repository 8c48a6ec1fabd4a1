"""The shortest periodic schedule of an allocation, by an integer program (MILP; MadPipe, second phase; scipy's HiGHS).

The unknowns are lambda = 1 / T, s = t / T of each task, and the laps K of each pair of tasks that share a resource
(`planners.periodic.retiming`). Divided by T all constraints are linear, without big-M constants:

    largest lambda with, for i < j on the path,
      s_next >= s_j + d_j lambda                                              the path
      K_ij + d_i lambda <= s_j - s_i <= K_ij + 1 - d_j lambda                 alone on a resource
      sum over stages of a device: stored * count + fixed <= memory           when each of its forward tasks starts

Laps are shifts and orders in one: K_ij = h_j - h_i - 1 + o_ij with s = x + h, 0 <= x < 1, and o_ij = 1 where x_i < x_j.
When forward task f starts, a stage stores what has begun less what has ended, which follows from laps:

    count = K(F, f) + K(f, B) + 1 if the stage is earlier on the path than f,    K(f, B) + 1 if f is its own,
            K(f, B) - K(f, F)     if it is later

Valid inequalities that help the solver: no task waits a whole period for the previous one (else all that follow could
start a period earlier); K_ik - K_ij - K_jk is 0 or 1 (the cyclic order of three tasks); the average bytes of a device
are within its memory; laps are at least what the path itself takes; periods are below that of a greedy schedule.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, combinations, pairwise
from typing import Any

from harness.core.plan import Stage
from planners.periodic.bounds import activation_memory, lower_bound, most_activations, sequential, stored
from planners.periodic.greedy import quick
from planners.periodic.layer_ticks import Chain
from planners.periodic.retiming import retime, sharing
from planners.periodic.task_times import Task, Timing, path, task_positions

TOLERANCE = Fraction(1, 10**6)
"""The relative difference of periods that the solver can distinguish."""
ROOM = 1000
"""The unit of memory, as a share 1 / ROOM of what a device has for activations: the solver's tolerance is absolute."""


@dataclass(frozen=True)
class Solved:
    """The result of `solve`: the best `timing`, if any, and a lower `bound` of the period.

    `finished`: the timing is the best (to `TOLERANCE`), or there is none; else the time limit was reached. Without a
    timing, `bound` is the requested upper limit, or, for an allocation without memory for one micro-batch, the length
    of its path.
    """

    timing: Timing | None
    bound: Fraction
    finished: bool


def solve(chain: Chain, stages: Sequence[Stage], limit_s: float, below: Fraction | None = None) -> Solved:
    """Finds the timing of these stages with the smallest period below `below`, within about `limit_s` seconds.

    Without `below` it always finds a timing if each device has memory for one micro-batch, however short the time. A
    device may have any stages, also adjacent ones.
    """
    least = lower_bound(chain, stages)
    if least is None:
        return Solved(None, below or sequential(chain, stages).period, True)
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
    timing, dual, finished = _Program(chain, tuple(stages), least, limit).solved(limit_s)
    if timing is not None and timing.period < limit:
        best = timing
    bound = (best.period if best is not None else limit) if finished else max(least, dual)
    return Solved(best, bound, finished)


def layers_apart(chain: Chain, stages: Sequence[Stage], most: int) -> tuple[Stage, ...]:
    """Makes every layer a stage, on the same device, so that the layers of a stage need not run as one block.

    Where a device has more than `most` layers, they are that many blocks: again and again the block with the most work
    is cut where its halves differ least. There is no message, and no buffer, between stages on one device.
    """
    found = list(stages)
    for device in sorted({stage.device for stage in stages}):
        while sum(stage.device == device for stage in found) < most:
            long = [stage for stage in found if stage.device == device and stage.first < stage.last]
            if not long:
                break
            largest = max(long, key=lambda stage: _work(chain, stage.first, stage.last))
            place = found.index(largest)
            found[place : place + 1] = _halves(chain, largest)
    return tuple(found)


def _work(chain: Chain, first: int, last: int) -> int:
    return chain.loads[last + 1] - chain.loads[first]


def _halves(chain: Chain, stage: Stage) -> list[Stage]:
    def differ(last: int) -> int:
        return abs(_work(chain, stage.first, last) - _work(chain, last + 1, stage.last))

    last = min(range(stage.first, stage.last), key=differ)
    return [replace(stage, last=last), replace(stage, first=last + 1)]


@dataclass(frozen=True)
class _Program:
    """Timings with periods from `least` to below `limit`. Columns: lambda * load, s of each task, K of each pair."""

    chain: Chain
    stages: tuple[Stage, ...]
    least: Fraction
    limit: Fraction

    def solved(self, limit_s: float) -> tuple[Timing | None, Fraction, bool]:
        """Returns the best timing that was found, if any, a lower bound of the period, and whether the search is
        complete."""
        low, high = self._bounds()
        rows = [*self._path(), *self._alone(), *self._orders(), *self._memory()]
        whole = [column > len(self.tasks) for column in range(len(low))]
        answer = minimize({0: -1.0}, rows, low, high, whole, limit_s)
        dual = self.least if not answer.mip_dual_bound else self.load / Fraction(-answer.mip_dual_bound)
        bound = min(max(dual * (1 - TOLERANCE), self.least), self.limit)
        if answer.x is None:
            return None, bound, answer.status == 2
        timing = retime(self.chain, self.stages, {pair: round(answer.x[n]) for pair, n in self.columns.items()})
        if timing is None or max(timing.memory().values()) > self.chain.memory:
            return None, bound, False
        return timing, bound, answer.status == 0

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        return path(self.chain, self.stages)

    @cached_property
    def load(self) -> int:
        """The unit of time: the ticks of the busiest resource in a period."""
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
        return task_positions(self.tasks)

    @cached_property
    def room(self) -> dict[int, int]:
        return activation_memory(self.chain, self.stages)

    @cached_property
    def most(self) -> dict[int, int]:
        return most_activations(self.chain, self.stages, self.room)

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
        """Yield the constraints of devices with several stages; for one stage the bound on its laps is enough."""
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
        """Limits what the device stores when the forward task of the stage `here` starts."""
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


Row = tuple[dict[int, float], float, float]
"""Coefficients by column, and the lower and upper bound of their sum."""


def minimize(
    cost: Mapping[int, float],
    rows: Sequence[Row],
    low: Sequence[float],
    high: Sequence[float],
    whole: Sequence[bool],
    limit_s: float,
) -> Any:
    """Returns scipy's answer to the program with the least `cost` (by column) within about `limit_s` seconds.

    Columns are between `low` and `high`; those that are `whole` are integers.
    """
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    values = [value for row, _, _ in rows for value in row.values()]
    where = ([n for n, (row, _, _) in enumerate(rows) for _ in row], [c for row, _, _ in rows for c in row])
    matrix = csr_array((values, where), shape=(len(rows), len(low)))
    with _quiet():
        return milp(
            [cost.get(column, 0.0) for column in range(len(low))],
            integrality=np.array(whole),
            bounds=Bounds(low, high),
            constraints=LinearConstraint(matrix, [row[1] for row in rows], [row[2] for row in rows]),
            options={"time_limit": limit_s, "mip_rel_gap": 0.0},
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Discards standard output: HiGHS prints lines now and then, whatever its options are."""
    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
