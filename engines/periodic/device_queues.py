"""The queues of a pattern's devices: one for what a device computes, one for each link into it.

A link is that of two devices in one direction: its messages leave in the order in which the source makes them, so none
of them waits after one that is not there yet.

On CUDA devices a lane has a stream, and a job has ended when its stream has: the next job, wherever it runs, finds the
tensors ready. This has not been seen running on several GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise

import torch

from harness.core.plan import Plan
from harness.runtime.cpu_streams import Context, Lane
from harness.runtime.memory_meter import DeviceMemory

CLOSING_S = 2.0


class DeviceQueues:
    """`compute[d]` of device d, `links[d, e]` from device d to device e, by the numbers of the plan."""

    def __init__(self, plan: Plan, devices: tuple[str, ...]) -> None:
        self.devices = {number: torch.device(devices[number]) for number in plan.devices}
        ends = [stage.device for stage in plan.stages]
        pairs = {pair for one, other in pairwise(ends) for pair in ((one, other), (other, one))}
        self.compute = {number: Lane(number, "compute") for number in plan.devices}
        self.links = {(one, other): Lane(other, "network") for one, other in sorted(pairs) if one != other}
        self.streams = {
            lane: torch.cuda.Stream(self.devices[lane.device])
            for lane in self.all()
            if self.devices[lane.device].type == "cuda"
        }
        self.counted_by({})

    def all(self) -> list[Lane]:
        return [*self.compute.values(), *self.links.values()]

    def counted_by(self, meters: Mapping[int, DeviceMemory]) -> None:
        """Meter the memory of these devices from now on, and of no others."""
        for lane in self.all():
            counting = meters[lane.device].counting if lane.device in meters else nullcontext
            stream = self.streams.get(lane)
            lane.context = counting if stream is None else partial(_on_stream, stream, counting)

    def close(self) -> None:
        """End the threads; jobs that are queued are done first."""
        for lane in self.all():
            lane.close()
        for lane in self.all():
            lane.join(CLOSING_S)


@contextmanager
def _on_stream(stream: torch.cuda.Stream, counting: Context) -> Iterator[None]:
    with counting(), torch.cuda.stream(stream):
        yield
        stream.synchronize()
