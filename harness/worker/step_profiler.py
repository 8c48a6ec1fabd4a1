"""launch.profiler: torch.profiler's trace of chosen steps, a file for each step and process, for Perfetto.

    profiler/step-5-rank-0.json.gz      every operator of rank 0 in step 5, and on a GPU every kernel and copy
    profiler/step-5-rank-0.pickle       on a GPU: every allocation with its stack, for https://pytorch.org/memory_viz

A step that is profiled takes longer, and counts as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from harness.core.run_files import PROFILER


@contextmanager
def profiled(folder: Path, steps: Collection[int], step: int) -> Iterator[None]:
    """Within it `step` is profiled if it is one of `steps`; its trace is in the run's folder afterwards.

    Threads count, too: devices of one process may be threads.
    """
    if step not in steps:
        yield
        return
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    settings = _ExperimentalConfig(profile_all_threads=True)
    rank = dist.get_rank() if dist.is_initialized() else 0
    place = folder / PROFILER / f"step-{step}-rank-{rank}"
    with (
        _allocations(place.with_suffix(".pickle")),
        profile(activities=activities, experimental_config=settings, acc_events=True) as found,
    ):
        yield
    place.parent.mkdir(parents=True, exist_ok=True)
    found.export_chrome_trace(str(place.with_suffix(".json.gz")))


@contextmanager
def _allocations(file: Path) -> Iterator[None]:
    """Within it the allocations of this process's GPUs are recorded; then they are in the file."""
    if not torch.cuda.is_initialized():
        yield
        return
    torch.cuda.memory._record_memory_history(stacks="python")  # those of C++ take minutes
    try:
        yield
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(file))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
