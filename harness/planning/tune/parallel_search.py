"""A large search in several processes, each of which examines one kind of scheme after another.

    kinds of deepspeed    process 0  |planner=megatron ..................|zero=1 .......|
                          process 1  |planner=megatron zero=1 .....|zero=3 ...|zero=2 ..|

What rules a candidate out is its own scheme, or the best of its kind: several processes find what one finds.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from ctypes import c_double, c_long
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from harness.host import devices
from harness.launch.die_with_parent import die_with
from harness.launch.signals import blocked
from harness.planning.tune.candidates import Candidate
from harness.planning.tune.result import Best, Fastest, Line

if TYPE_CHECKING:
    from harness.planning.tune.candidate_search import Block, Tuner

LARGE = 10_000
"""Candidates with which further processes pay: each plans again what others share with it."""
POLL_S = 0.2
STOP_S = 5.0
"""Seconds in which the processes end what they are looking at, once the search is ended."""
NEVER = float("inf")


@dataclass(frozen=True)
class Examined:
    """What was found of a kind of scheme. `fewest` is the smallest number of devices of which any were looked at."""

    lines: dict[Candidate, Line]
    planned: set[Candidate]
    rows: list[Best]
    best: dict[str, Fastest]
    simulations: Counter[str]
    fewest: int


def pays(tuner: Tuner, blocks: Sequence[Block]) -> bool:
    """Whether a search has several kinds of schemes, many candidates, and several cores."""
    several = len({block.scheme.kind for block in blocks}) > 1 and devices.cores() > 1
    return several and sum(_candidates(tuner, block) for block in blocks) > LARGE


def _candidates(tuner: Tuner, block: Block) -> int:
    return len(tuner.meshes(block)) * len(tuner.works)


def examine(tuner: Tuner, blocks: Sequence[Block]) -> None:
    """Look at the blocks in as many processes as there are cores. What a process was at that is killed is looked at by
    this one.

    Raises KeyboardInterrupt, once what was found until then is known, if the user ends the search, and the first error
    of a process.
    """
    kinds = _Kinds(tuner, blocks)
    count = min(len(kinds.names), devices.cores())
    kinds.inherited.append(kinds)
    try:
        with ProcessPoolExecutor(count, multiprocessing.get_context("fork"), die_with, (os.getpid(),)) as pool:
            try:
                with blocked():  # a signal to all processes is for this one
                    kinds.running += [pool.submit(_examined, number) for number in range(len(kinds.names))]
                kinds.follow()
            except BaseException:
                kinds.end()
                raise
    finally:
        kinds.inherited.clear()
    for number in kinds.take():
        for _ in tuner.looks(kinds.parts[number]):
            tuner.say()


def _examined(number: int) -> Examined:
    return _Kinds.inherited[0].examined(number)


class _Kinds:
    """The kinds of schemes of a search, the largest first, and what all processes see of them."""

    inherited: ClassVar[list[_Kinds]] = []
    """Those that processes are forked for."""

    def __init__(self, tuner: Tuner, blocks: Sequence[Block]) -> None:
        sizes: Counter[str] = Counter()
        for block in blocks:
            sizes[block.scheme.kind] += _candidates(tuner, block)
        self.tuner, self.names = tuner, [kind for kind, _ in sizes.most_common()]
        self.parts = [[block for block in blocks if block.scheme.kind == kind] for kind in self.names]
        self.running: list[Future[Examined]] = []
        self.others = multiprocessing.active_children()
        self.stops = multiprocessing.RawValue("b", 0)
        self.counts = multiprocessing.RawArray(c_long, 3 * len(self.names))
        self.best_s = multiprocessing.RawArray(c_double, [NEVER] * len(self.names))

    def examined(self, number: int) -> Examined:
        """Look at a kind, in a process that was forked for it, until the search is ended."""
        own = self.tuner
        own.lines, own.planned, own.rows, own.best, own.simulations = {}, set(), [], {}, Counter()
        for _ in own.looks(self.parts[number]):
            done = sum(own.simulations.values())
            self.counts[3 * number : 3 * number + 3] = [len(own.lines), len(own.planned), done]
            self.best_s[number] = own.best_s.get(self.names[number], NEVER)
            if self.stops.value:
                break
        own.queue.clear()
        own.layouts.clear()
        return Examined(own.lines, own.planned, own.rows, own.best, own.simulations, own.fewest)

    def follow(self) -> None:
        """Show how far the processes are, until they have ended. Raises the first error of one."""
        while (looked := wait(self.running, POLL_S)).not_done:
            for one in looked.done:
                if (error := one.exception()) and not isinstance(error, BrokenProcessPool):
                    raise error
            listed, planned, simulated = (sum(self.counts[first::3]) for first in range(3))
            best_s = {kind: best for kind, best in zip(self.names, self.best_s, strict=True) if best < NEVER}
            self.tuner.show(listed, planned, simulated, best_s)

    def end(self) -> None:
        """Have the processes end, and add to the search what they have found by then."""
        self.stops.value = 1
        if wait(self.running, STOP_S).not_done:
            for process in set(multiprocessing.active_children()) - {*self.others}:
                process.kill()
        self.take(failing=False)

    def take(self, failing: bool = True) -> list[int]:
        """Add to the search what the processes have found. Returns the numbers of kinds whose processes were killed.

        Raises the error of a process, if it is to be `failing`.
        """
        lost = []
        for number, one in enumerate(self.running):
            if isinstance(one.exception(), BrokenProcessPool):
                lost.append(number)
                continue
            if one.exception() and not failing:
                continue
            found = one.result()
            self.tuner.lines |= found.lines
            self.tuner.planned |= found.planned
            self.tuner.rows += found.rows
            self.tuner.best |= found.best
            self.tuner.best_s |= {kind: best.row.step_time_s for kind, best in found.best.items()}
            self.tuner.simulations += found.simulations
            self.tuner.fewest = min(self.tuner.fewest, found.fewest)
        return lost
