"""torch's collectives under the names that its release has: those of 2.13 first, the older ones warn there.

The collectives that a library calls inside a pass: seconds that they held up this rank, bytes of their buffers.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_to_all = dist.all_to_all_single


class CollectiveCounter:
    """Counts by algorithm ("all_gather", "reduce_scatter", ...), as in a schedule; `take` starts again from zero."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._bytes: Counter[str] = Counter()

    @contextmanager
    def counting(self, algorithm: str, size: int = 0) -> Iterator[None]:
        """Around a collective whose buffer has `size` bytes, or around waiting for it, without."""
        began = time.perf_counter()
        yield
        self._seconds[algorithm] += time.perf_counter() - began
        if size:
            self._bytes[algorithm] += size

    def take(self) -> tuple[defaultdict[str, float], Counter[str]]:
        """Seconds and bytes of each algorithm since the last time; 0 of one that was not called."""
        taken = self._seconds, self._bytes
        self._seconds, self._bytes = defaultdict(float), Counter()
        return taken
