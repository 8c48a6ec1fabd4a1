"""Sums of gradients over replicas, chunk by chunk, while chunks that have been summed are updated.

chunk 0   |= all_reduce =|
chunk 1   | waits        |= all_reduce =|        all are enqueued at once, and run one after the other
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from engines.myelin.buckets import Chunk
from harness.core.op import Op, Queue
from harness.runtime.device_clock import TimePoint


@dataclass(frozen=True)
class ChunkAllReduce:
    """An all-reduce in flight. `ended` waits for it and returns the time when it ended."""

    op: Op
    work: dist.Work
    ended: Callable[[], TimePoint]


class GradientAllReduce:
    """All sums of one step, of `chunks` of the gradients that replicas share; what of a chunk comes after these is left
    alone. `queue` is what a trace says they run in; `next_to`, on a GPU, a stream in which nothing else runs."""

    def __init__(
        self,
        gradients: Tensor,
        chunks: Sequence[Chunk],
        group: dist.ProcessGroup,
        stage: int,
        queue: Queue,
        now: Callable[[], TimePoint],
        next_to: torch.cuda.Stream | None,
    ) -> None:
        self.now, self.next_to = now, next_to
        self.last = now()
        parts = [(one.part, gradients[one.start : one.stop]) for one in chunks if one.start < len(gradients)]
        self.sums = [self._started(part, name, group, stage, queue) for name, part in parts]

    def _started(self, part: Tensor, name: str, group: dist.ProcessGroup, stage: int, queue: Queue) -> ChunkAllReduce:
        op = Op(stage, "collective", None, f"all_reduce@data/{name}", bytes=part.nbytes, queue=queue)
        work = dist.all_reduce(part, group=group, async_op=True)
        return ChunkAllReduce(op, work, self._watch(work))

    def _watch(self, work: dist.Work) -> Callable[[], TimePoint]:
        """Record when an all-reduce ends: on a CPU in its completion thread, on a GPU with a stream that waits for
        it."""
        if self.next_to is None:
            seen = work.get_future().then(lambda _: self.now())
            return seen.wait

        def ended() -> TimePoint:
            with torch.cuda.stream(self.next_to):
                work.wait()
                return self.now()

        return ended

    def done(self) -> Iterator[tuple[Op, TimePoint, TimePoint]]:
        """Yield each all-reduce (op, start, end) in order, once the current stream may use its result."""
        for one in self.sums:
            ended = one.ended()
            one.work.wait()
            began, self.last = self.last, _later(self.last, ended)
            yield one.op, began, self.last


def _later(first: TimePoint, second: TimePoint) -> TimePoint:
    """Return the later of two times: gloo may end two concurrent all-reduces in either order."""
    return max(first, second) if isinstance(first, float) and isinstance(second, float) else second
