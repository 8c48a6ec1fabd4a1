"""A fixed piece of work of a CPU core: where it takes longer, the machine is slow, and not the layers.

What else runs on the same hardware fills caches, takes memory bandwidth or lowers the clock, also where no thread waits
for a core: a virtual machine's neighbors do.

    when the machine was measured    |work|                                              quickest: 9 ms
    around the rounds of a profile   |= work =| round 1 |=== work ===| round 2 |work|    1.3 and 1.3 times as long
    before and after a run's steps   |= work =| step 0 | step 1 | ... |=== work ===|     1.2 times at least
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

BUDGET_S, OTHER = 0.5, 2**22
"""Seconds for the quickest try, and the numbers that other work reads and writes in between."""


def layers() -> Callable[[], None]:
    """Forward and backward of what stages are made of: convolutions that compute, and layers that move memory."""
    with torch.device("cpu"):  # whatever a user's file has set
        block = (nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()) for _ in range(2))
        chain = nn.Sequential(*block).to(torch.float32)
        images = torch.randn(2, 32, 96, 96, dtype=torch.float32)

    def once() -> None:
        with torch.enable_grad():
            chain(images).sum().backward()

    return once


def quickest_s() -> float:
    """The time of the work on this machine, the quickest of several tries between other work."""
    pace, other = Pace(1.0), torch.ones(OTHER)
    end = time.perf_counter() + BUDGET_S
    tries: list[float] = []
    while not tries or time.perf_counter() < end:
        other.add_(1.0)
        tries.append(pace.look())
    return min(tries)


class Pace:
    """How the time of the work compares with `quiet_s`, what it takes on this machine when that is quiet; 0: nobody
    knows, and nothing is done."""

    def __init__(self, quiet_s: float) -> None:
        self.quiet_s = quiet_s
        with torch.random.fork_rng(devices=[]):
            self._work = layers() if quiet_s else None

    def look(self) -> float:
        """Do the work once more, after a time that does not count, since other work has filled the caches. Returns how
        many times as long it takes as on a quiet machine; 1 where nobody knows."""
        if not self._work:
            return 1.0
        self._work()
        start = time.perf_counter()
        self._work()
        return (time.perf_counter() - start) / self.quiet_s
