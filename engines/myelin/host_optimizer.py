"""The optimizer's state, and float32 weights, in the host's memory; buckets of them visit the device.

place a | in(0a) |= step(0a) =| out(0a) | in(1a) |= step(1a) =| ...       bucket 0 is 0a and 0b
      b          | in(0b) |= step(0b) =| out(0b) | in(1b) |= step(1b) =|
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.myelin.buckets import Chunk, Half
from engines.myelin.flat_buffers import FlatBuffers
from engines.myelin.optimizers import Optimizer, Run
from harness.core.op import Op, Queue
from harness.runtime.device_clock import TimePoint
from harness.runtime.loss_scale import unscaled

Event = torch.cuda.Event | None
"""A CUDA event; None on a CPU, where all work is complete when a call returns."""


@dataclass
class _Place:
    """Half of the device's buffers. Rows: gradients, master weights, what the optimizer keeps."""

    rows: list[Tensor]
    free: Event = None

    def of(self, half: Half) -> list[Tensor]:
        return [row[: half.stop - half.start] for row in self.rows]


class HostOptimizer:
    """`master` are the weights that the optimizer updates, `rows` what it keeps of each, all on the host.

    On the device remain weights and gradients (in half precision 4 bytes a parameter), and with Adam 16 bytes for each
    of `bsize` parameters: gradients, weights and two moments in float32, in two halves. On a GPU the copies have a
    stream each way, so that one half is updated while the other one comes or goes. On a CPU they are copies in its own
    memory, one after the other.
    """

    def __init__(
        self,
        flat: FlatBuffers,
        optimizer: Optimizer,
        bsize: int,
        stage: int,
        now: Callable[[], TimePoint],
        note: Callable[[Op, TimePoint, TimePoint], None],
    ) -> None:
        self.flat, self.optimizer, self.stage, self.now, self.note = flat, optimizer, stage, now, note
        self.cuda = flat.device.type == "cuda"
        count, size = 1 + len(optimizer.rows), min(bsize, flat.size)
        kept = [torch.zeros(flat.size, dtype=flat.wide, pin_memory=self.cuda) for _ in range(count)]
        self.master, self.rows = kept[0].copy_(flat.weights), kept[1:]
        self.buffers = torch.zeros(1 + count, size, dtype=flat.wide, device=flat.device)
        cut = size - size // 2
        self.places = [_Place([row[part] for row in self.buffers]) for part in (slice(cut), slice(cut, size))]
        self.incoming = torch.cuda.Stream(flat.device) if self.cuda else None
        self.outgoing = torch.cuda.Stream(flat.device) if self.cuda else None

    def begin(self) -> None:
        """Updates of a step begin: what comes in waits for the gradients, and for what has left in the step before."""
        if self.incoming and self.outgoing:
            self.incoming.wait_stream(torch.cuda.current_stream(self.flat.device))
            self.incoming.wait_stream(self.outgoing)

    def update(self, chunk: Chunk, runs: Sequence[Run], scale: float) -> None:
        """Update the chunk's weights from its gradients, which are divided by `scale`."""
        for half in chunk.halves:
            place = self.places[half.place]
            rows = place.of(half)
            filled = self._fetch(half, rows, place.free)
            updated = self._step(half, rows, filled, runs, scale)
            place.free = self._store(half, rows, updated)

    def _fetch(self, half: Half, rows: list[Tensor], free: Event) -> Event:
        with _on(self.incoming):
            _after(free)
            began = self.now()
            for row, kept in zip(rows[1:], [self.master, *self.rows], strict=True):
                row.copy_(kept[half.start : half.stop], non_blocking=True)
            self._note(half, "in", "copy in", began)
            return self._event()

    def _step(self, half: Half, rows: list[Tensor], filled: Event, runs: Sequence[Run], scale: float) -> Event:
        _after(filled)
        began, part = self.now(), slice(half.start, half.stop)
        gradients, master, *kept = rows
        unscaled(self.flat.gradients[part], gradients, scale)
        self.optimizer.step(master, gradients, kept, runs, half.start)
        self.flat.weights[part].copy_(master)
        self.note(Op(self.stage, "step", None, half.part), began, self.now())
        return self._event()

    def _store(self, half: Half, rows: list[Tensor], updated: Event) -> Event:
        with _on(self.outgoing):
            _after(updated)
            began = self.now()
            for row, kept in zip(rows[1:], [self.master, *self.rows], strict=True):
                kept[half.start : half.stop].copy_(row, non_blocking=True)
            self._note(half, "out", "copy out", began)
            return self._event()

    def _note(self, half: Half, way: str, queue: Queue, began: TimePoint) -> None:
        size = (half.stop - half.start) * (1 + len(self.rows)) * self.master.element_size()
        op = Op(self.stage, "copy", None, f"{half.part}/{way}", bytes=size, queue=queue)
        self.note(op, began, self.now())

    def _event(self) -> Event:
        """This point in the current stream."""
        return torch.cuda.current_stream(self.flat.device).record_event() if self.cuda else None

    def synchronize(self) -> None:
        """Wait until `master` and `rows` can be read."""
        if self.cuda:
            torch.cuda.synchronize(self.flat.device)

    def held(self) -> list[Tensor]:
        """Return the optimizer's tensors on the device, in addition to parameters and gradients."""
        return [self.buffers]


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return torch.cuda.stream(stream) if stream else nullcontext()


def _after(event: Event) -> None:
    """Make work issued to the current stream wait for the event."""
    if event is not None:
        event.wait()
