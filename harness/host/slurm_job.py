"""The allocation of the Slurm job of this process, from its environment. Does not import torch.

A future job can be expected: then its allocation is returned instead.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

JOB, NODES, TASKS = "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_TASKS_PER_NODE"
GPUS = "SLURM_GPUS_ON_NODE"


@dataclass(frozen=True)
class Allocation:
    """The allocation of one job: the tasks of each node, in order, and the GPUs of this node (None: unknown).

    `started`: these are no job's, but the ranks that another launcher has started, which it says by these variables.
    """

    job: str
    tasks: tuple[int, ...]
    gpus: int | None = None
    started: str = ""

    @property
    def nodes(self) -> int:
        return len(self.tasks)


_EXPECTED: ContextVar[Allocation | None] = ContextVar("expected", default=None)


@contextmanager
def expecting(job: Allocation | None) -> Iterator[None]:
    """Treats this process as part of `job` within the context, on one of its nodes; None changes nothing."""
    before = _EXPECTED.set(job)
    try:
        yield
    finally:
        _EXPECTED.reset(before)


def expected() -> Allocation | None:
    """Returns the job that `expecting` has set, if any."""
    return _EXPECTED.get()


def current(environment: Mapping[str, str] = os.environ) -> Allocation | None:
    """Returns the allocation of the job of this process; None outside of Slurm."""
    if job_to_come := expected():
        return job_to_come
    job = environment.get(JOB)
    if not job:
        return None
    tasks = counts(environment.get(TASKS, "")) or (1,) * int(environment.get(NODES, 1))
    gpus = environment.get(GPUS, "")
    return Allocation(job, tasks, int(gpus) if gpus.isdigit() else None)


def counts(text: str) -> tuple[int, ...]:
    """Parses Slurm's "2(x3),1" to (2, 2, 2, 1)."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return tuple(int(count) for count, times in parts for _ in range(int(times or 1)))
