"""The nodes that Slurm has given to the job which this process is part of, as its environment tells. Free of torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

JOB, NODES, TASKS = "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_TASKS_PER_NODE"
CPUS, GPUS = "SLURM_CPUS_ON_NODE", "SLURM_GPUS_ON_NODE"


@dataclass(frozen=True)
class Allocation:
    """Of one job: the tasks of each node, in order, and the CPUs of this one (None: not known)."""

    job: str
    tasks: tuple[int, ...]
    cpus: int | None = None

    @property
    def nodes(self) -> int:
        return len(self.tasks)


def found(environment: Mapping[str, str] = os.environ) -> Allocation | None:
    """The allocation of the job that this process is part of; None outside of Slurm."""
    job = environment.get(JOB)
    if not job:
        return None
    tasks = counts(environment.get(TASKS, "")) or (1,) * int(environment.get(NODES, 1))
    cpus = environment.get(CPUS, "")
    return Allocation(job, tasks, int(cpus) if cpus.isdigit() else None)


def counts(text: str) -> tuple[int, ...]:
    """What Slurm writes as "2(x3),1" is 2, 2, 2, 1."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return tuple(int(count) for count, times in parts for _ in range(int(times or 1)))
