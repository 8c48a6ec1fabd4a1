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
from harness.runtime.session import TimePoint


@dataclass(frozen=True)
class ChunkAllReduce:
    """One that is under way. `ended` waits for it, and says when it had ended."""

    op: Op
    work: dist.Work
    ended: Callable[[], TimePoint]


class GradientAllReduce:
    """All sums of one step, of `chunks` of the gradients that replicas share; what of a chunk comes after these is left
    alone. `queue` is what a trace says they run in."""

    def __init__(
        self,
        gradients: Tensor,
        chunks: Sequence[Chunk],
        group: dist.ProcessGroup,
        stage: int,
        queue: Queue,
        now: Callable[[], TimePoint],
    ) -> None:
        self.now = now
        self.last = now()
        self.next_to = torch.cuda.Stream(gradients.device) if gradients.device.type == "cuda" else None
        parts = [(one.part, gradients[one.start : one.stop]) for one in chunks if one.start < len(gradients)]
        self.sums = [self._started(part, name, group, stage, queue) for name, part in parts]

    def _started(self, part: Tensor, name: str, group: dist.ProcessGroup, stage: int, queue: Queue) -> ChunkAllReduce:
        op = Op(stage, "collective", None, f"all_reduce@data/{name}", bytes=part.nbytes, queue=queue)
        work = dist.all_reduce(part, group=group, async_op=True)
        return ChunkAllReduce(op, work, self._watch(work))

    def _watch(self, work: dist.Work) -> Callable[[], TimePoint]:
        """On a CPU the thread that ends it looks at the clock; on a GPU a stream of its own waits for it."""
        if self.next_to is None:
            seen = work.get_future().then(lambda _: self.now())
            return seen.wait

        def ended() -> TimePoint:
            with torch.cuda.stream(self.next_to):
                work.wait()
                return self.now()

        return ended

    def done(self) -> Iterator[tuple[Op, TimePoint, TimePoint]]:
        """One after the other, when the current stream may use it: the op, when it began and when it had ended."""
        for one in self.sums:
            ended = one.ended()
            one.work.wait()
            began, self.last = self.last, _later(self.last, ended)
            yield one.op, began, self.last


def _later(first: TimePoint, second: TimePoint) -> TimePoint:
    """Two sums that gloo runs at once end in either order."""
    return max(first, second) if isinstance(first, float) and isinstance(second, float) else second
