"""Both phases of MadPipe: allocations whose loads and memory allow a period, then the start times of their tasks."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from harness.core.plan import Stage
from planners.madpipe.paper_algorithm import algorithm_1
from planners.periodic import contiguous_partition, one_f_one_b_star
from planners.periodic.bounds import lower_bound
from planners.periodic.label_search import Search
from planners.periodic.layer_ticks import Chain
from planners.periodic.milp import layers_apart, solve
from planners.periodic.min_memory import pack_layers
from planners.periodic.min_period import fixed_point, stages_from_runs
from planners.periodic.reassign_devices import SLICE_S, improve, without_needless_cuts
from planners.periodic.task_times import Timing

if TYPE_CHECKING:
    from planners.madpipe.planner import Config

Allocation = tuple[Stage, ...]
HIGHER = (Fraction(1, 16), Fraction(1, 4), Fraction(1, 2))
"""Where, between the bound and the best period so far, the search looks for further allocations."""
TIGHTER = (0.97, 0.94, 0.9, 0.85, 0.8)
"""Shares of a device's memory that are tried."""
SAME = Fraction(1, 10**9)
"""Relative difference below which periods are equal (ticks are rounded). Then consecutive stages are preferred."""
SMALL, SMALL_DEVICE = 40, 12
"""Blocks of a chain, and of a device, that run apart at most: more are too many for the integer program."""
WORTH = Fraction(1, 100)
"""By which share a plan of more stages must be better, and how far above a bound nothing better is looked for."""
APART = 0.25
"""The share of the time limit in which layers may run apart, at most: of what whole stages leave."""


@dataclass(frozen=True)
class SearchResult:
    """The best plan, and the best ones of whole stages and of consecutive ones; `whole` is `timing` where no layers
    run apart, and there may be no consecutive one. In ticks: the period of the first phase, and `least`.

    `least` is a lower bound for plans of whole stages with one special device (None for the published search, which
    proves nothing, and where only more special devices are enough). `finished`: the second phase had enough time.
    """

    timing: Timing
    whole: Timing
    contiguous: Timing | None
    first_phase: Fraction
    least: Fraction | None
    finished: bool


def search(chain: Chain, devices: int, config: Config) -> SearchResult | int:
    """Returns the best plan that is found; if there is none, the fewest bytes of a device for which one is known.

    These are within `chain.memory` only if `planner.allocation` is the reason that none was found.
    """
    if config.allocation == "published":
        return _published(chain, devices, config) or pack_layers(chain, devices, config.limit_s)[0]
    return _Exact(chain, devices, config).run()


def least_period(chain: Chain, devices: int) -> Fraction:
    """Returns a lower bound of the period of any schedule, in ticks: layers on any devices, in any order, in blocks or
    not.

    Devices share the work evenly at best; one layer is a task of one device. A layer stores a micro-batch at least
    as long as it and all layers after it run, which is as many periods as it stores micro-batches, limited by the
    device's memory; and together devices hold, on average, all states and activations.
    """
    rest = [chain.loads[-1] - before for before in chain.loads[:-1]]
    bounds = [Fraction(chain.loads[-1], devices), Fraction(max(chain.work))]
    for load, size, state in zip(rest, chain.stored, chain.state, strict=True):
        if size and chain.memory - state >= size:
            bounds.append(Fraction(load, (chain.memory - state) // size))
    free = devices * chain.memory - (chain.states[-1] - chain.counted_twice([range(chain.layers)]))
    if free > 0:
        bounds.append(Fraction(sum(load * size for load, size in zip(rest, chain.stored, strict=True)), free))
    return max(bounds)


def _published(chain: Chain, devices: int, config: Config) -> SearchResult | None:
    """Runs the paper's two phases and nothing else."""
    bound = algorithm_1(chain, devices, iterations=config.iterations)
    if bound is None:
        return None
    solved = solve(chain, bound.stages, config.limit_s)
    if solved.timing is None:
        return None
    return SearchResult(solved.timing, solved.timing, None, Fraction(bound.period), None, solved.finished)


class _Exact:
    """Finds the best contiguous plan, or a better one: of the allocation with the least period in the first phase, or
    of one with a longer period there but a shorter schedule."""

    def __init__(self, chain: Chain, devices: int, config: Config) -> None:
        self.chain, self.devices, self.config = chain, devices, config
        self.end_s = time.monotonic() + config.limit_s
        self.best: Timing | None = None
        self.earlier: list[Timing] = []
        self.finished = True

    def run(self) -> SearchResult | int:
        consecutive = contiguous_partition.best(self.chain, self.devices)
        if consecutive is not None:
            period, stages = consecutive
            self._keep(one_f_one_b_star.timing(self.chain, stages, period))
        bound = fixed_point(self.chain, self.devices, consecutive[0] if consecutive else None)
        if bound is not None:
            for stages in self._allocations(bound.period, bound.stages):
                self._try(stages)
        if self.best is None:
            needed, stages = pack_layers(self.chain, self.devices, self._left_s() / 2)
            if needed > self.chain.memory:
                return needed
            self._try(stages)
        assert self.best is not None
        first = Fraction(bound.period) if bound else lower_bound(self.chain, self.best.stages)
        assert first is not None
        if self.config.reassign:
            self._reassign(first if bound else Fraction(0))
        contiguous = self.earlier[0] if consecutive else None
        if contiguous is not None and self.best.period > contiguous.period * (1 - SAME):
            self.best = contiguous
        whole = self.best
        if not self.config.atomic:
            self.end_s = min(self.end_s, time.monotonic() + APART * self.config.limit_s)
            self._apart(bound.stages if bound else whole.stages)
        least = first - (self.chain.duplex == "full") if bound else None  # there it is rounded up to a tick
        return SearchResult(self.best, whole, contiguous, first, least, self.finished)

    def _allocations(self, period: int, stages: Allocation) -> Iterator[Allocation]:
        """Yields the allocations to try, the most promising first, each once."""
        seen: set[Allocation] = set()
        for allocation in itertools.chain((stages,), self._tighter(), self._longer(period)):
            if self.best is not None and self.best.period <= period:
                return
            if self.best is not None and self._left_s() <= 0:
                self.finished = False
                return
            if allocation not in seen:
                seen.add(allocation)
                yield allocation

    def _tighter(self) -> Iterator[Allocation]:
        """Yields allocations for devices with less memory: they leave room for what the first phase does not count."""
        for share in TIGHTER:
            upper = None if self.best is None else math.ceil(self.best.period)
            smaller = replace(self.chain, memory=int(self.chain.memory * share))
            bound = fixed_point(smaller, self.devices, upper)
            if bound is None or (self.best is not None and bound.period >= self.best.period):
                return  # with even less memory the period is no shorter
            yield bound.stages

    def _longer(self, period: int) -> Iterator[Allocation]:
        """Yields allocations for longer periods than the first one."""
        search = Search(self.chain, self.devices)
        for share in HIGHER:
            if self.best is not None and self.best.period > period:
                runs = search.at(period + int((self.best.period - period) * share)).allocation()
                if runs is not None:
                    yield stages_from_runs(runs)

    def _try(self, stages: Allocation) -> None:
        below = None if self.best is None else self.best.period
        solved = solve(self.chain, stages, self._left_s(), below)
        self.finished &= solved.finished
        if solved.timing is not None:
            self._keep(solved.timing)

    def _keep(self, timing: Timing) -> None:
        """Keeps the best so far; earlier ones may lead further when stages change devices."""
        self.best = timing
        self.earlier.append(timing)

    def _reassign(self, goal: Fraction) -> None:
        for timing in reversed(self.earlier):
            if self.best is None or self.best.period <= goal:
                return
            better, enough = improve(self.chain, timing, self.devices, self._left_s())
            self.finished &= enough
            if better.period < self.best.period:
                self.best = better

    def _apart(self, stages: Allocation) -> None:
        """Tries the layers of the best stages, of those of the first phase and of all others so far as separate stages;
        then on other devices."""
        assert self.best is not None
        near = least_period(self.chain, self.devices) * (1 + WORTH)
        most = min(SMALL_DEVICE, max(1, SMALL // self.devices))
        wholes = (self.best.stages, stages, *(timing.stages for timing in reversed(self.earlier)))
        worth = self.best.period * (1 - WORTH)
        for layers in dict.fromkeys(layers_apart(self.chain, whole, most) for whole in wholes):
            if self.best.period <= near:
                return
            if self._left_s() <= 0:
                self.finished = False
                return
            solved = solve(self.chain, layers, min(SLICE_S, self._left_s()))
            self.finished &= solved.finished
            timing = solved.timing
            if timing is not None and self.config.reassign:
                timing, enough = improve(self.chain, timing, self.devices, self._left_s())
                self.finished &= enough
            if timing is not None and timing.period <= worth:
                self.best = without_needless_cuts(timing)
                worth = self.best.period * (1 - SAME)

    def _left_s(self) -> float:
        return max(0.0, self.end_s - time.monotonic())
