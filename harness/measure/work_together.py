"""How much longer work takes where several threads or processes do it at once, from rounds in turns.

    alone      |-----|          |-----|
    together           |------|         |------|
                       |------|         |------|      2 queues do the work of 2 * 5 / 6

They share cores, caches and memory, and threads of one Python its lock, too: one at a time can start an operation.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial

import torch
import torch.distributed as dist

from harness.host import run_queue
from harness.launch import forked_ranks
from harness.measure import reference_work
from harness.runtime.cpu_streams import Job, JobQueue, Run

Work = Callable[[], None]

CORES_S, PASSES = 1.5, 2
"""Seconds of the test of the cores, and passes in each of its rounds."""
QUIET, QUIET_ROUNDS = 0.02, 5
"""A round counts if its threads waited no larger share of it for a core; and so many of them are enough."""
LOCK_S, ROUND_S, LEAST_ROUNDS = 0.5, 0.02, 3
"""Seconds of the test of Python's lock, of one of its rounds at least, and how many it has at least."""


@dataclass(frozen=True)
class Round:
    """Seconds of the slowest queue: by the clock, on a core, and ready but without one."""

    wall_s: float
    running_s: float
    waited_s: float

    @property
    def quiet(self) -> bool:
        """Whether nobody waited for a core."""
        return self.waited_s < QUIET * self.wall_s


@contextmanager
def queues_of_devices(count: int) -> Iterator[list[JobQueue]]:
    """The compute queues of so many CPU devices, threads of this process."""
    queues = [JobQueue(index, "compute") for index in range(count)]
    try:
        yield queues
    finally:
        for queue in queues:
            queue.close()


def threads_together(queues: list[JobQueue]) -> float:
    """Number of queues' worth of work that all of them do at once.

    The medians of the rounds in which no thread waited for a core: others kept it, else. Where there are too few of
    them, the time that the threads did run.
    """
    passes = [reference_work.layers() for _ in queues]
    one_round(queues, passes, PASSES)  # the first pass allocates
    alone, together = [], []
    end = time.perf_counter() + CORES_S
    while time.perf_counter() < end:
        alone.append(one_round(queues[:1], passes[:1], PASSES))
        together.append(one_round(queues, passes, PASSES))
    return _worth(len(queues), alone, together)


def processes_together(count: int) -> float:
    """`threads_together` of processes, which share cores and memory, but no interpreter."""

    def rank() -> tuple[list[Round], list[Round]]:
        torch.set_num_threads(1)
        once, first = reference_work.layers(), dist.get_rank() == 0
        once()
        alone, together = [], []
        end = time.perf_counter() + CORES_S
        while _all_say(time.perf_counter() < end):
            alone += [_own_round(once, PASSES)] if first else []
            dist.barrier()
            together.append(_own_round(once, PASSES))
        others: list[list[Round]] = [[] for _ in range(count)]
        dist.all_gather_object(others, together)
        return alone, [_slowest(of_all) for of_all in zip(*others, strict=True)]

    return _worth(count, *forked_ranks.run_on_ranks(count, rank, ["cpu"] * count))


def lock_share(one: Work, other: Work) -> float:
    """The share by which each further thread of this process that does such work at once makes it longer.

    `one` and `other` do the same work on their own tensors: two threads take 1 + share times as long as one of them
    alone. 0 where each has a core and neither needs the interpreter much; more than 1 where they do worse than one
    after the other, since each waits for a lock that the other one has just given back and taken again.
    """
    with queues_of_devices(2) as queues:
        first = one_round(queues, [one, other], 1)  # the first pass allocates
        passes = max(1, math.ceil(ROUND_S / max(first.wall_s, 1e-9)))
        alone: list[Round] = []
        together: list[Round] = []
        end = time.perf_counter() + LOCK_S
        while time.perf_counter() < end or len(alone) < LEAST_ROUNDS:
            alone.append(one_round(queues[:1], [one], passes))
            together.append(one_round(queues, [one, other], passes))
    longer = _wall_s(together) / _wall_s(alone)
    return max(0.0, longer - 1)


def _wall_s(rounds: Sequence[Round]) -> float:
    """The median, of the rounds in which nobody waited for a core if these are enough."""
    quiet = [one.wall_s for one in rounds if one.quiet]
    return statistics.median(quiet if len(quiet) >= LEAST_ROUNDS else [one.wall_s for one in rounds])


def _worth(count: int, alone: Sequence[Round], together: Sequence[Round]) -> float:
    """By the medians of the rounds in which nobody waited for a core, or by the time on a core."""
    quiet = [[r.wall_s for r in rounds if r.quiet] for rounds in (alone, together)]
    if min(map(len, quiet)) >= QUIET_ROUNDS:
        one, among = (statistics.median(seconds) for seconds in quiet)
    else:
        one, among = (min(r.running_s for r in rounds) for rounds in (alone, together))
    return max(1.0, min(float(count), count * one / among))


def _all_say(own: bool) -> bool:
    """Rank 0's answer, in all ranks."""
    answer = torch.tensor([own])
    dist.broadcast(answer, 0)
    return bool(answer)


def _own_round(once: Work, passes: int) -> Round:
    before = _clocks()
    for _ in range(passes):
        once()
    return Round(*(now - then for now, then in zip(_clocks(), before, strict=True)))


def _slowest(rounds: Sequence[Round]) -> Round:
    return Round(*(max(getattr(one, field.name) for one in rounds) for field in fields(Round)))


def one_round(queues: Sequence[JobQueue], works: Sequence[Work], passes: int) -> Round:
    """All queues begin at once; each makes its passes."""
    run, begin = Run(), threading.Barrier(len(queues))
    rounds: list[Round] = []

    def repeat(once: Work) -> None:
        begin.wait()
        rounds.append(_own_round(once, passes))

    jobs = [queue.submit(Job(run, partial(repeat, once))) for queue, once in zip(queues, works, strict=True)]
    for job in jobs:
        job.wait()
    run.raise_error()
    return _slowest(rounds)


def _clocks() -> tuple[float, float, float]:
    """Return this thread's wall time, time on a core, and time in the run queue of a core (Linux; elsewhere 0)."""
    return time.perf_counter(), time.thread_time(), run_queue.of_thread().waited_s
