"""The optimizer's state, and float32 weights, in the host's memory; buckets of them visit the device.

buffers a | in(0a) |= step(0a) =| out(0a) | in(1a) |= step(1a) =| ...       bucket 0 is 0a and 0b
        b          | in(0b) |= step(0b) =| out(0b) | in(1b) |= step(1b) =|
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.myelin.buckets import Bucket, Chunk
from engines.myelin.flat import Flat
from engines.myelin.optimizers import Optimizer, Run
from engines.myelin.scaling import unscaled
from harness.op import Op, Queue
from harness.rank_session import Mark

Event = torch.cuda.Event | None
"""When a stream had come so far; None on a CPU, where everything has been done when a call returns."""


@dataclass
class _Buffer:
    """Half of the device's buffers. Rows: gradients, master weights, what the optimizer keeps."""

    rows: list[Tensor]
    filled: Event = None
    updated: Event = None
    free: Event = None


@dataclass(frozen=True)
class _Half:
    """The elements `start` .. `stop` - 1 of a bucket, and the buffer that they visit."""

    buffer: _Buffer
    start: int
    stop: int

    @property
    def rows(self) -> list[Tensor]:
        return [row[: self.stop - self.start] for row in self.buffer.rows]


class Offloaded:
    """`master` are the weights that the optimizer updates, `rows` what it keeps of each, all on the host.

    On the device remain weights and gradients (in half precision 4 bytes a parameter), and with Adam 16 bytes for each
    of `bsize` parameters: gradients, weights and two moments in float32, in two halves. On a GPU the copies have a
    stream each way, so that one half is updated while the other one comes or goes. On a CPU they are copies in its own
    memory, one after the other.
    """

    def __init__(
        self, flat: Flat, optimizer: Optimizer, bsize: int, stage: int, now: Callable[[], Mark],
        note: Callable[[Op, Mark, Mark], None],
    ) -> None:  # fmt: skip
        self.flat, self.optimizer, self.stage, self.now, self.note = flat, optimizer, stage, now, note
        self.cuda = flat.device.type == "cuda"
        count, size = 1 + len(optimizer.rows), min(bsize, flat.size)
        kept = [torch.zeros(flat.size, dtype=flat.wide, pin_memory=self.cuda) for _ in range(count)]
        self.master, self.rows = kept[0].copy_(flat.weights), kept[1:]
        self.buffers = torch.zeros(1 + count, size, dtype=flat.wide, device=flat.device)
        self.cut = size - size // 2
        self.halves = [
            _Buffer([row[part] for row in self.buffers]) for part in (slice(self.cut), slice(self.cut, size))
        ]
        self.incoming = torch.cuda.Stream(flat.device) if self.cuda else None
        self.outgoing = torch.cuda.Stream(flat.device) if self.cuda else None

    def begin(self) -> None:
        """Updates of a step begin: what comes in waits for the gradients, and for what has left in the step before."""
        if self.incoming and self.outgoing:
            self.incoming.wait_stream(torch.cuda.current_stream(self.flat.device))
            self.incoming.wait_stream(self.outgoing)

    def update(self, chunk: Chunk, runs: Sequence[Run], scale: float) -> None:
        """Update the chunk's weights from its gradients, which are divided by `scale`."""
        for bucket in chunk.buckets:
            halves = self._halves(bucket)
            self._fetch(bucket, halves)
            self._step(bucket, halves, runs, scale)
            self._store(bucket, halves)

    def _halves(self, bucket: Bucket) -> list[_Half]:
        middle = min(bucket.start + self.cut, bucket.stop)
        ends = ((bucket.start, middle), (middle, bucket.stop))
        pairs = zip(self.halves, ends, strict=True)
        return [_Half(buffer, start, stop) for buffer, (start, stop) in pairs if start < stop]

    def _fetch(self, bucket: Bucket, halves: list[_Half]) -> None:
        with _on(self.incoming):
            _after(halves[0].buffer.free)
            began = self.now()
            for half in halves:
                _after(half.buffer.free)
                for row, kept in zip(half.rows[1:], [self.master, *self.rows], strict=True):
                    row.copy_(kept[half.start : half.stop], non_blocking=True)
                half.buffer.filled = self._event()
            self._note(bucket, "in", "copy in", began)

    def _step(self, bucket: Bucket, halves: list[_Half], runs: Sequence[Run], scale: float) -> None:
        _after(halves[0].buffer.filled)
        began = self.now()
        for half in halves:
            _after(half.buffer.filled)
            part = slice(half.start, half.stop)
            gradients, master, *rows = half.rows
            unscaled(self.flat.gradients[part], gradients, scale)
            self.optimizer.step(master, gradients, rows, runs, half.start)
            self.flat.weights[part].copy_(master)
            half.buffer.updated = self._event()
        self.note(Op(self.stage, "step", None, bucket.part), began, self.now())

    def _store(self, bucket: Bucket, halves: list[_Half]) -> None:
        with _on(self.outgoing):
            _after(halves[0].buffer.updated)
            began = self.now()
            for half in halves:
                _after(half.buffer.updated)
                for row, kept in zip(half.rows[1:], [self.master, *self.rows], strict=True):
                    kept[half.start : half.stop].copy_(row, non_blocking=True)
                half.buffer.free = self._event()
            self._note(bucket, "out", "copy out", began)

    def _note(self, bucket: Bucket, way: str, queue: Queue, began: Mark) -> None:
        size = (bucket.stop - bucket.start) * (1 + len(self.rows)) * self.master.element_size()
        op = Op(self.stage, "copy", None, f"{bucket.part}/{way}", bytes=size, queue=queue)
        self.note(op, began, self.now())

    def _event(self) -> Event:
        """This point in the current stream."""
        return torch.cuda.current_stream(self.flat.device).record_event() if self.cuda else None

    def settle(self) -> None:
        """Wait until `master` and `rows` can be read."""
        if self.cuda:
            torch.cuda.synchronize(self.flat.device)

    def held(self) -> list[Tensor]:
        """What of it the device holds, beside the parameters and their gradients."""
        return [self.buffers]


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return torch.cuda.stream(stream) if stream else nullcontext()


def _after(event: Event) -> None:
    """What the current stream is given from now on waits for the event."""
    if event is not None:
        event.wait()
