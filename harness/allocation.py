"""The nodes that Slurm has given to the job which this process is part of, as its environment tells. Free of torch.

A job that is still to come can be expected: then what it will have is what is found.
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
    """Of one job: the tasks of each node, in order, and the GPUs of this one (None: not known)."""

    job: str
    tasks: tuple[int, ...]
    gpus: int | None = None

    @property
    def nodes(self) -> int:
        return len(self.tasks)


_EXPECTED: ContextVar[Allocation | None] = ContextVar("expected", default=None)


@contextmanager
def expecting(job: Allocation | None) -> Iterator[None]:
    """Within it this process is taken to be part of `job`, on one of its nodes; None changes nothing."""
    before = _EXPECTED.set(job)
    try:
        yield
    finally:
        _EXPECTED.reset(before)


def expected() -> Allocation | None:
    """The job that is taken for this process's, if one is."""
    return _EXPECTED.get()


def found(environment: Mapping[str, str] = os.environ) -> Allocation | None:
    """The allocation of the job that this process is part of; None outside of Slurm."""
    if job_to_come := expected():
        return job_to_come
    job = environment.get(JOB)
    if not job:
        return None
    tasks = counts(environment.get(TASKS, "")) or (1,) * int(environment.get(NODES, 1))
    gpus = environment.get(GPUS, "")
    return Allocation(job, tasks, int(gpus) if gpus.isdigit() else None)


def counts(text: str) -> tuple[int, ...]:
    """What Slurm writes as "2(x3),1" is 2, 2, 2, 1."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return tuple(int(count) for count, times in parts for _ in range(int(times or 1)))
