"""Points in the work of a device, and when they were: the host's clock on a CPU, events on a GPU.

    host     synchronize | issue F | issue B |      ...      | synchronize | seconds(point)
    GPU      x base      |    x = F ==x = B =====x  points   |

A GPU works after the host has issued the work, so that its points have times only once it has come there. All that says
when something ran is recorded as points, and becomes seconds at the end of a step.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

TimePoint = float | torch.cuda.Event
"""A point in the work of a device: seconds of the host's clock on a CPU, an event on a GPU."""
Interval = tuple[TimePoint, TimePoint]


class DeviceClock:
    """Of one device. Its seconds are those of the host's clock (`time.perf_counter`)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._base: tuple[float, torch.cuda.Event] | None = None

    def now(self, stream: torch.cuda.Stream | None = None) -> TimePoint:
        """Return this point in the device's work: on a GPU in `stream`, by default the current one."""
        return time.perf_counter() if self.device.type != "cuda" else self._event(stream)

    def synchronize(self) -> float:
        """Return the time in seconds, once the device has done what it was given. Later points count from here."""
        if self.device.type != "cuda":
            return time.perf_counter()
        torch.cuda.synchronize(self.device)
        self._base = time.perf_counter(), self._event(None)
        return self._base[0]

    def seconds(self, point: TimePoint) -> float:
        """Return when a point was. The device has come there: it was synchronized before the point and after it."""
        if isinstance(point, float):
            return point
        assert self._base is not None, "points have times from the first synchronization on"
        base_s, base = self._base
        return base_s + float(base.elapsed_time(point)) / 1e3

    def total_s(self, intervals: Iterable[Interval]) -> float:
        """Return the seconds in all of these."""
        return sum(self.seconds(end) - self.seconds(start) for start, end in intervals)

    def _event(self, stream: torch.cuda.Stream | None) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream or torch.cuda.current_stream(self.device))
        return event
