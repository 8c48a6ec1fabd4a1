"""A rank that srun has started: it joins the others by itself, where `harness.ranks` would fork it.

The parent hears of it by files in the run's folder, and by what srun says of its end.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

import torch.distributed as dist

from harness import group, mpi
from harness.meeting import Meeting
from harness.problem import CannotRun, Problem

T = TypeVar("T")


def work(count: int, do: Callable[[], T], device: str, with_mpi: bool, meeting: Meeting) -> T:
    """Do the work as one of `count` ranks; what it returned in rank 0. Every other rank ends here."""
    if meeting.count != count:
        what, mend = f"is not the number of ranks of the plan, {count}", "start run.py: it starts the ranks"
        raise CannotRun([Problem(f"SLURM_STEP_NUM_TASKS {meeting.count}", what, mend)])
    group.join(meeting.rank, count, device, meeting.local, store=meeting.store())
    if with_mpi:
        mpi.enter_step(count)
    result = do()
    dist.barrier()  # none leaves while another one still has messages for it
    dist.destroy_process_group()
    if meeting.rank:
        leave(0)
    return result


def leave(code: int) -> NoReturn:
    """End without tidying up: libraries would wait for ranks that are no more."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
