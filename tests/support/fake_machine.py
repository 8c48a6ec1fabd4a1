"""The GPUs of tests/support/fake_gpus.py: which tensors are on which one, and the current streams of each thread."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from tests.support.stream_order import HOST, Range, StreamOrder


class Machine:
    """What the fakes share. `gpu` has the number of the GPU of each storage that is on one."""

    def __init__(self) -> None:
        self.order = StreamOrder()
        self.gpu: dict[int, int] = {}
        self.pinned: set[int] = set()
        self.names = itertools.count()
        self.works: dict[int, tuple[str, Work]] = {}
        self.local = threading.local()
        self.lock = threading.RLock()
        self.known: set[int] = set()
        self.device = 0

    def stream(self, gpu: int) -> Stream:
        """The current stream of this thread on a GPU."""
        streams: dict[int, Stream] = self.local.__dict__.setdefault("streams", {})
        if gpu not in streams:
            streams[gpu] = Stream(f"cuda:{gpu}", name=f"gpu {gpu}")
        return streams[gpu]

    def of(self, tensor: Tensor) -> int | None:
        return self.gpu.get(block_of(tensor))

    def allocated(self, tensor: Tensor, gpu: int | None) -> None:
        """Memory is new: on a GPU it belongs to the current stream."""
        block = block_of(tensor)
        if block in self.known:
            return
        self.known.add(block)
        weakref.finalize(tensor.untyped_storage(), self.died, block)
        if gpu is not None:
            self.gpu[block] = gpu
        self.order.allocate(block, HOST if gpu is None else self.stream(gpu).name)

    def died(self, block: int) -> None:
        with self.lock:
            self.known.discard(block)
            self.pinned.discard(block)
            self.order.free(block)
            self.gpu.pop(block, None)

    def host_waits(self, stream: str) -> None:
        self.order.join(HOST, self.order.clock(stream))


MACHINE = Machine()


def block_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def range_of(tensor: Tensor) -> Range:
    """The bytes that a tensor may touch."""
    size = tensor.element_size()
    first = tensor.storage_offset() * size
    reach = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return Range(block_of(tensor), first, first + (reach + 1) * size)


def gpu_number(device: Any) -> int | None:
    """The number of a GPU that a device is; None for the host."""
    if isinstance(device, int):
        return device
    found = torch.device(device)
    return None if found.type != "cuda" else MACHINE.device if found.index is None else found.index


def current_stream(device: Any = None) -> Stream:
    """torch.cuda.current_stream."""
    return MACHINE.stream(MACHINE.device if device is None else gpu_number(device) or 0)


class Stream:
    """torch.cuda.Stream."""

    def __init__(self, device: Any = None, priority: int = 0, name: str = "") -> None:
        self.gpu = MACHINE.device if device is None else gpu_number(device) or 0
        self.device = torch.device("cuda", self.gpu)
        self.name = name or f"gpu {self.gpu}, stream {next(MACHINE.names)}"

    def wait_stream(self, other: Stream) -> None:
        MACHINE.order.join(self.name, MACHINE.order.clock(other.name))
        MACHINE.order.join(self.name, MACHINE.order.clock(HOST))

    def wait_event(self, event: Event) -> None:
        MACHINE.order.join(self.name, event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        MACHINE.host_waits(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


class Event:
    """torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.clock: dict[str, int] = {}
        self.at_s = 0.0
        self.asked = False

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict(MACHINE.order.clock((stream or current_stream()).name))
        self.at_s = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        MACHINE.order.join(HOST, self.clock)

    def query(self) -> bool:
        """Whether the GPU has come there: it has not when one looks for the first time."""
        if not self.asked:
            self.asked = True
            return False
        self.synchronize()
        return True

    def elapsed_time(self, later: Event) -> float:
        return (later.at_s - self.at_s) * 1e3


@contextmanager
def elsewhere(gpu: int | None) -> Iterator[None]:
    before, MACHINE.local.gpu = getattr(MACHINE.local, "gpu", None), (gpu,)
    try:
        yield
    finally:
        MACHINE.local.gpu = before


def wait_for(group_stream: str) -> None:
    gpu = int(group_stream.split(",")[0].removeprefix("gpu "))
    MACHINE.order.join(MACHINE.stream(gpu).name, MACHINE.order.clock(group_stream))
