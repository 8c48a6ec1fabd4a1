"""What torch's allocator has, as torch.profiler sees it."""

from __future__ import annotations

from collections.abc import Callable

import torch


def allocator_peak_bytes(step: Callable[[], None]) -> int:
    """The most that torch.profiler saw allocated at once, beyond what was there at the start."""
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profiler:
        step()
    live = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak
