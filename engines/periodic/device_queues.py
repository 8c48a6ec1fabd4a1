"""The queues of a pattern's devices: one for what a device computes, one for each link into it.

A link is that of two devices in one direction: its messages leave in the order in which the source makes them, so none
of them waits after one that is not there yet.

On CUDA devices a queue has a stream, and a job has ended when its stream has: the next job, wherever it runs, finds the
tensors ready. This has not been seen running on several GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise

import torch

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
        self.streams = {
            queue: torch.cuda.Stream(self.devices[queue.device])
            for queue in self.all()
            if self.devices[queue.device].type == "cuda"
        }
        self.counted_by({})

    def all(self) -> list[JobQueue]:
        return [*self.compute.values(), *self.links.values()]

    def counted_by(self, meters: Mapping[int, DeviceMemory]) -> None:
        """Meter the memory of these devices from now on, and of no others."""
        for queue in self.all():
            counting = meters[queue.device].counting if queue.device in meters else nullcontext
            stream = self.streams.get(queue)
            queue.context = counting if stream is None else partial(_on_stream, stream, counting)

    def close(self) -> None:
        """End the threads; jobs that are queued are done first."""
        for queue in self.all():
            queue.close()
        for queue in self.all():
            queue.join(CLOSING_S)


@contextmanager
def _on_stream(stream: torch.cuda.Stream, counting: Context) -> Iterator[None]:
    with counting(), torch.cuda.stream(stream):
        yield
        stream.synchronize()
