"""CUDA streams and clocks of the devices of a pipeline; on other devices the same calls do nothing and tell the time.

Each device computes on its current stream, and micro-batches take turns on its copy streams (torchgpipe, section 3.2.3,
has one for each micro-batch). They are few and stay the same: the allocator keeps a pool of memory for every stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from harness.core.op import Op, Queue
from harness.core.trace import Span
from harness.runtime.device_clock import DeviceClock, TimePoint

COPY_STREAMS = 4
"""Copy streams of a device: copies of so many micro-batches can be under way at once."""


CopyStreams = dict[int, list[torch.cuda.Stream]]


def copy_streams(devices: tuple[torch.device, ...]) -> CopyStreams:
    """Return the copy streams of each CUDA device, by its number."""
    return {
        d: [torch.cuda.Stream(device) for _ in range(COPY_STREAMS)]
        for d, device in enumerate(devices)
        if device.type == "cuda"
    }


class Streams:
    """The streams of one pass by device number of the plan; without `copies`, copies continue the compute streams."""

    def __init__(self, devices: tuple[torch.device, ...], copies: CopyStreams | None) -> None:
        self.devices, self._copies = devices, copies
        self.cuda = devices[0].type == "cuda"
        self.separate = copies is not None
        self.clocks = [DeviceClock(device) for device in devices]
        self._compute = {d: torch.cuda.current_stream(device) for d, device in enumerate(devices) if self.cuda}

    def _copy(self, device: int, i: int) -> torch.cuda.Stream:
        """Return the stream in which a device copies what is of micro-batch i."""
        return self._compute[device] if self._copies is None else self._copies[device][i % COPY_STREAMS]

    def copy_after_compute(self, device: int, i: int) -> None:
        """The copy stream of micro-batch i waits for what the device computes."""
        if self.cuda:
            self._copy(device, i).wait_stream(self._compute[device])

    def compute_after_copy(self, device: int, i: int) -> None:
        """The compute stream waits for the copies of micro-batch i."""
        if self.cuda:
            self._compute[device].wait_stream(self._copy(device, i))

    @contextmanager
    def copying(self, source: int, target: int, i: int) -> Iterator[None]:
        """Within it, a copy between the devices runs on their copy streams. The target's waits for the source's first,
        as the copy does, so that a mark in it is not earlier than what is copied."""
        with ExitStack() as stack:
            if self.cuda:
                self._copy(target, i).wait_stream(self._copy(source, i))
                stack.enter_context(torch.cuda.stream(self._copy(source, i)))
                stack.enter_context(torch.cuda.stream(self._copy(target, i)))
            yield

    def used_by_copy(self, tensor: torch.Tensor, device: int, i: int) -> None:
        """Keep the allocator from reusing the tensor's memory before the copy has read it."""
        if self.cuda:
            tensor.record_stream(self._copy(device, i))

    def used_by_compute(self, tensor: torch.Tensor, device: int) -> None:
        """Keep the allocator from reusing memory that a copy stream allocated before the device has read it."""
        if self.cuda:
            tensor.record_stream(self._compute[device])

    def now(self, device: int, copy_of: int | None = None) -> TimePoint:
        """A point in the compute stream of a device, or in its copy stream of a micro-batch."""
        if not self.cuda:
            return self.clocks[device].now()
        stream = self._compute[device] if copy_of is None else self._copy(device, copy_of)
        return self.clocks[device].now(stream)


class Recorder:
    """Collects the marks of a pass and turns them into spans once the devices are synchronized."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.begun: dict[Op, TimePoint] = {}
        self.marks: list[tuple[Op, int, Queue, TimePoint, TimePoint]] = []
        for clock in streams.clocks:
            clock.synchronize()

    @contextmanager
    def computing(self, op: Op, device: int) -> Iterator[None]:
        start = self.streams.now(device)
        yield
        self.marks.append((op, device, "compute", start, self.streams.now(device)))

    def spans(self) -> list[Span]:
        """Every op as (start, end) in seconds of the host's clock. The devices must be synchronized."""
        clocks = self.streams.clocks
        return [
            Span(str(op), device, queue, clocks[device].seconds(start), clocks[device].seconds(end))
            for op, device, queue, start, end in self.marks
        ]
