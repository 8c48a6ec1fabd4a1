"""A fixed piece of work of a CPU core, which tells a slow moment of the machine from slow layers.

What else runs on the same hardware fills caches, takes memory bandwidth or lowers the clock, also where no thread waits
for a core: a virtual machine's neighbors do.

    when the machine was measured    |work|                                            quickest: 9 ms
    before each round of a profile   |= work =| round 1 |= work =| round 2 ...         median: 12 ms, slowed by 1.33
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn


def layers() -> Callable[[], None]:
    """Forward and backward of what stages are made of: convolutions that compute, and layers that move memory."""
    block = (nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()) for _ in range(2))
    chain = nn.Sequential(*block)
    images = torch.randn(2, 32, 96, 96)

    def once() -> None:
        chain(images).sum().backward()

    return once


class Pace:
    """How the time of the work compares with `quiet_s`, what it takes on this machine when that is quiet; 0: nobody
    knows, and nothing is done."""

    def __init__(self, quiet_s: float) -> None:
        self.quiet_s = quiet_s
        self._work = layers() if quiet_s else None
        self._seconds: list[float] = []

    def look(self) -> None:
        """Do the work once more; another time before, since other work has filled the caches."""
        if self._work:
            self._work()
            start = time.perf_counter()
            self._work()
            self._seconds.append(time.perf_counter() - start)

    def slowed(self) -> float:
        """The median over `quiet_s`, at least 1."""
        return max(1.0, statistics.median(self._seconds) / self.quiet_s) if self._seconds else 1.0
