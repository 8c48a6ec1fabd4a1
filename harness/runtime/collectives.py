"""torch's collectives under the names that its release has: those of 2.13 first, the older ones warn there; groups.

The collectives that a library calls inside a pass: when they held up this rank, and bytes of their buffers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from harness.runtime.device_clock import Interval, TimePoint

LEAST_PATIENCE = timedelta(hours=1)
_patience = LEAST_PATIENCE


def patience() -> timedelta:
    """Return the timeout of this process's collectives and messages."""
    return _patience


def outlast(limit_s: float | None) -> None:
    """Have collectives and messages wait for longer than the parent, which ends a run without progress after
    `limit_s` seconds (`launch.timeout_s`) and says in which rank it hangs."""
    global _patience
    _patience = max(LEAST_PATIENCE, timedelta(seconds=2 * (limit_s or 0.0)))


all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_to_all = dist.all_to_all_single


Held = defaultdict[str, list[Interval]]
"""When collectives held up a rank, by algorithm."""


def new_group(ranks: Sequence[int], options: Any = None) -> dist.ProcessGroup:
    """Return a process group of these ranks, with NCCL's `options`. Collective: every rank of the run calls it, in the
    same order.

    On GPUs its communicator is opened here, which takes seconds with many ranks: rank 0 says that it goes on, so that
    the run is not ended for making no progress.
    """
    group: dist.ProcessGroup = dist.new_group(list(ranks), timeout=patience(), pg_options=options)
    if torch.cuda.is_initialized() and dist.get_rank() == 0:
        print(f"opened a communicator of ranks {', '.join(map(str, ranks))}", flush=True)
    return group


class CollectiveCounter:
    """Counts by algorithm ("all_gather", "reduce_scatter", ...), as in a schedule; `take` starts again from zero.

    `now` is that of the session, so that on a GPU the stream is timed that a collective holds up.
    """

    def __init__(self, now: Callable[[], TimePoint]) -> None:
        self._now = now
        self._held: Held = defaultdict(list)
        self._bytes: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()

    @contextmanager
    def counting(self, algorithm: str, size: int = 0) -> Iterator[None]:
        """Around a collective whose buffer has `size` bytes, or around waiting for it, without."""
        began = self._now()
        yield
        self._held[algorithm].append((began, self._now()))
        self.sent(algorithm, size)

    def sent(self, algorithm: str, size: int) -> None:
        """A collective whose buffer has `size` bytes is under way and holds up nobody yet."""
        if size:
            self._bytes[algorithm] += size
            self._calls[algorithm] += 1

    def take(self) -> tuple[Held, Counter[str]]:
        """When each algorithm held up the rank, and its bytes, since the last time; nothing of one that was not
        called."""
        taken = self._held, self._bytes
        self._held, self._bytes = defaultdict(list), Counter()
        return taken

    def take_calls(self) -> Counter[str]:
        """How many collectives of each algorithm this rank has begun since the last time."""
        taken, self._calls = self._calls, Counter()
        return taken
