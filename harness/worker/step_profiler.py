"""launch.profiler: torch.profiler's trace of chosen steps, a file for each step and process, for Perfetto.

    profiler/step-5-rank-0.json.gz      every operator of rank 0 in step 5, and on a GPU every kernel and copy
    profiler/step-5-rank-0.pickle       on a GPU: every allocation with its stack, for https://pytorch.org/memory_viz

A step that is profiled takes longer, and counts as it is. A file that cannot be written is said, and ends no run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from harness.core.run_files import PROFILER


@contextmanager
def profiled(folder: Path, steps: Collection[int], step: int, say: Callable[[str], None] = print) -> Iterator[None]:
    """Within it `step` is profiled if it is one of `steps`; its trace is in the run's folder afterwards.

    Threads count, too: devices of one process may be threads. `say` gets why a file was not written.
    """
    if step not in steps:
        yield
        return
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    settings = _ExperimentalConfig(profile_all_threads=True)
    rank = dist.get_rank() if dist.is_initialized() else 0
    place = folder / PROFILER / f"step-{step}-rank-{rank}"
    with (
        _allocations(place.with_suffix(".pickle"), say),
        profile(activities=activities, experimental_config=settings, acc_events=True) as found,
    ):
        yield
    _written(found.export_chrome_trace, place.with_suffix(".json.gz"), say)


@contextmanager
def _allocations(file: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Within it the allocations of this process's GPUs are recorded; then they are in the file."""
    if not torch.cuda.is_initialized():
        yield
        return
    torch.cuda.memory._record_memory_history(stacks="python")  # those of C++ take minutes
    try:
        yield
        _written(torch.cuda.memory._dump_snapshot, file, say)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def _written(write: Callable[[str], None], file: Path, say: Callable[[str], None]) -> None:
    """Let `write` make a file. One that it could not write whole is removed."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write(str(file))
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            file.unlink(missing_ok=True)
        say(f"no {file.parent.name}/{file.name}: {error}")
