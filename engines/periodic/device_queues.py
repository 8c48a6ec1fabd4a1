"""The queues of a pattern's devices: one for what a device computes, one for each link into it.

A link is that of two devices in one direction: its messages leave in the order in which the source makes them, so none
of them waits after one that is not there yet.

On CUDA devices a queue has a stream, a link one at each end, and a job has ended when its streams have: the next job,
wherever it runs, finds the tensors ready. But a tensor's memory belongs to the stream that has made it, and is free
once nobody holds the tensor: other streams that use it say so (`copied`), else the next tensor of its own stream would
overwrite it under them. This has not been seen running on several GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from harness.core.plan import Plan
from harness.runtime.cpu_streams import Context, JobQueue
from harness.runtime.memory_meter import DeviceMemory

CLOSING_S = 2.0


class DeviceQueues:
    """`compute[d]` of device d, `links[d, e]` from device d to device e, by the numbers of the plan."""

    def __init__(self, plan: Plan, devices: tuple[str, ...]) -> None:
        self.devices = {number: torch.device(devices[number]) for number in plan.devices}
        ends = [stage.device for stage in plan.stages]
        pairs = {pair for one, other in pairwise(ends) for pair in ((one, other), (other, one))}
        self.compute = {number: JobQueue(number, "compute") for number in plan.devices}
        self.links = {(one, other): JobQueue(other, "network") for one, other in sorted(pairs) if one != other}
        self.streams = {queue: self._streams_on(queue.device) for queue in self.compute.values()}
        self.streams |= {self.links[one, other]: self._streams_on(one, other) for one, other in self.links}
        self.counted_by({})

    def _streams_on(self, *numbers: int) -> list[torch.cuda.Stream]:
        """Return a stream on each of these devices; none on those that have none."""
        return [torch.cuda.Stream(self.devices[number]) for number in numbers if self.devices[number].type == "cuda"]

    def all(self) -> list[JobQueue]:
        return [*self.compute.values(), *self.links.values()]

    def counted_by(self, meters: Mapping[int, DeviceMemory]) -> None:
        """Meter the memory of these devices from now on, and of no others."""
        for queue in self.all():
            counting = meters[queue.device].counting if queue.device in meters else nullcontext
            streams = self.streams[queue]
            queue.context = partial(_on_streams, streams, counting) if streams else counting

    def copied(self, sent: Iterable[Tensor | None], arrived: Iterable[Tensor | None], source: int, target: int) -> None:
        """What was sent is used by the link's stream on the source, what arrived by the target's compute stream."""
        for stream in self.streams[self.links[source, target]][:1]:
            _keep(sent, stream)
        for stream in self.streams[self.compute[target]]:
            _keep(arrived, stream)

    def close(self) -> None:
        """End the threads; jobs that are queued are done first."""
        for queue in self.all():
            queue.close()
        for queue in self.all():
            queue.join(CLOSING_S)


def _keep(tensors: Iterable[Tensor | None], stream: torch.cuda.Stream) -> None:
    """Keep the allocator from giving the tensors' memory away before the stream has used them."""
    for tensor in tensors:
        if tensor is not None:
            tensor.record_stream(stream)


@contextmanager
def _on_streams(streams: Sequence[torch.cuda.Stream], counting: Context) -> Iterator[None]:
    with counting(), ExitStack() as stack:
        for stream in streams:
            stack.enter_context(torch.cuda.stream(stream))
        yield
        for stream in streams:
            done = torch.cuda.Event(blocking=True)  # its thread sleeps: waiting for the stream itself would spin
            done.record(stream)
            done.synchronize()
