"""Messages by MPI: Isend, Irecv, and a thread that completes them while the rank computes.

    main      | -------- F3 -------- | arrived | ------- B1 ------- |    (nothing to do: it polls itself)
    thread     .    .    .    .    .            .    .    .    .    .     polls

MPI moves a large message only while somebody calls it. Nothing here blocks in MPI: a blocked call would spin.

On GPUs MPI sends from their memory and receives into it, if it says that it can, else messages are copied to the host
and back. Either way a send is begun once the GPU has made what is sent: MPI knows no streams.

    main      issues F3, F4, ...                 (goes on)
    GPU       |== F3 ==|== copy 3 ==|            the copy only where MPI cannot
    thread     polls    .    .       Isend 3

On GPUs it is untested.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from harness.runtime.collectives import patience
from harness.runtime.transports.transport import Channel, Completed, Position, Transport

BUSY_S, FAR_S = 1e-2, 1e-3
"""Between two polls while the rank computes, where all ranks share memory and where they do not. Each takes the
interpreter from the rank for a moment: one every millisecond costs 5 % of a step. In shared memory the receiver gets a
message whole, whatever its sender does; through a network it moves in pieces, one with each poll."""
IDLE_S, IDLE_SHARE = (1e-6, 2e-4), 1 / 8
"""Between two polls while it waits: such a share of what it has waited already, within these bounds. So a message is
noticed late by a small part of a wait, and a long wait costs a tenth of a core."""
GONE_S = 1.0
"""Within which the thread ends."""


@dataclass(eq=False)
class _Transfer:
    """One send or receive. `held` are what its requests read or write, from the `point` on that the GPU must have come
    to; `target` where it is to go."""

    channel: Channel
    micro_batch: int
    held: list[Tensor]
    target: list[Tensor]
    peer: int
    point: torch.cuda.Event | None
    left: int = 0


class MPITransport(Transport):
    """Messages over the MPI world of `harness.launch.mpi`, whose ranks are those of the group."""

    def __init__(
        self, position: Position, channels: Sequence[Channel], micro_batches: int, device: torch.device
    ) -> None:
        super().__init__(position, channels, micro_batches, device)
        self._world = MPI.COMM_WORLD.Dup()
        self._pause_s = BUSY_S if _shares_memory(self._world) else FAR_S
        self._takes = takes_gpu_memory()
        self._staged = device.type == "cuda" and not self._takes
        self._lock = threading.Lock()
        self._sends: deque[_Transfer] = deque()
        self._receives: deque[_Transfer] = deque()
        self._requests: list[MPI.Request] = []
        self._owners: list[_Transfer] = []
        self._done: deque[tuple[_Transfer, float]] = deque()
        self._error: Exception | None = None
        self._computing = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._poll, name="mpi", daemon=True)
        self._thread.start()

    @property
    def facts(self) -> dict[str, Any]:
        name, version = MPI.get_vendor()
        library = f"{name} {'.'.join(map(str, version))}"
        return {"mpi": {"library": library, "takes_gpu_memory": self._takes, "through_the_host": self._staged}}

    def _send(self, channel: Channel, micro_batch: int, tensors: list[Tensor]) -> None:
        held, peer = tensors, self.position.peer(channel.target)
        if self._staged:
            held = [_on_host(tensor).copy_(tensor, non_blocking=True) for tensor in tensors]
        self._begin(self._sends, _Transfer(channel, micro_batch, held, [], peer, self.point()))

    def _receive(self, channel: Channel, micro_batch: int, buffers: list[Tensor]) -> None:
        held = [_on_host(buffer) for buffer in buffers] if self._staged else buffers
        free = None if self._staged else self.point()  # what the buffers' memory was before may still be read
        peer = self.position.peer(channel.source)
        self._begin(self._receives, _Transfer(channel, micro_batch, held, buffers, peer, free))

    def _begin(self, waiting: deque[_Transfer], transfer: _Transfer) -> None:
        with self._lock:
            waiting.append(transfer)
            self._begin_ready()
        self._computing.set()

    def _begin_ready(self) -> None:
        """Give MPI what is ready; what has the same tag in the order in which it was given."""
        for waiting, call in ((self._sends, self._world.Isend), (self._receives, self._world.Irecv)):
            while waiting and (waiting[0].point is None or waiting[0].point.query()):
                one = waiting.popleft()
                tag = self.tag(one.channel, one.micro_batch)
                one.left = len(one.held)
                self._requests += [call(_bytes(tensor), one.peer, tag) for tensor in one.held]
                self._owners += [one] * one.left

    def _completed(self, wait: bool) -> list[Completed]:
        self._progress()
        if wait and not self._done:
            self._until(lambda: bool(self._done), "a message")
        found = []
        while self._done:
            transfer, at_s = self._done.popleft()
            for tensor, held in zip(transfer.target, transfer.held, strict=True):
                if held is not tensor:
                    tensor.copy_(held, non_blocking=True)
            found.append(Completed(transfer.channel, transfer.micro_batch, at_s))
        return found

    def finish(self) -> None:
        self._until(self._is_idle, "its messages to leave")
        self._computing.clear()

    def _is_idle(self) -> bool:
        """Whether no message is left; the other thread may be giving one to MPI."""
        with self._lock:
            return not (self._requests or self._sends or self._receives)

    def close(self) -> None:
        self._closed = True
        self._computing.set()
        self._thread.join(GONE_S)

    def _until(self, true: Callable[[], bool], what: str) -> None:
        """Poll in this thread, which has nothing else to do; the other one rests."""
        began = time.monotonic()
        least, most = IDLE_S
        self._computing.clear()
        while not true():
            waited = time.monotonic() - began
            if waited > patience().total_seconds():
                raise TimeoutError(f"device {self.position.device} has waited {patience()} for {what}")
            time.sleep(min(max(waited * IDLE_SHARE, least), most))
            self._progress()
        self._computing.set()

    def _progress(self) -> None:
        """Complete what is there. Of several that are, those that were begun first come first."""
        with self._lock:
            if self._error is not None:
                raise self._error
            self._begin_ready()
            ended = MPI.Request.Testsome(self._requests) if self._requests else None
            if not ended:
                return
            at_s = time.perf_counter()
            for index in sorted(ended):
                owner = self._owners[index]
                owner.left -= 1
                if owner.target and not owner.left:
                    self._done.append((owner, at_s))
            gone = set(ended)
            self._requests = [one for index, one in enumerate(self._requests) if index not in gone]
            self._owners = [one for index, one in enumerate(self._owners) if index not in gone]

    def _poll(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # in whose context MPI finds the memory
        while not self._closed:
            self._computing.wait()
            try:
                self._progress()
            except Exception as error:  # the main thread raises it
                self._error = error
                return
            time.sleep(self._pause_s)


def _shares_memory(world: MPI.Intracomm) -> bool:
    """Whether all ranks are on one host; all of them ask."""
    here = world.Split_type(MPI.COMM_TYPE_SHARED)
    count = here.Get_size()
    here.Free()
    return bool(count == world.Get_size())


def takes_gpu_memory() -> bool:
    """Whether MPI, which is initialized, says that it takes GPUs' memory. Open MPI and mpich have this extension; one
    that has not says no."""
    query = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
    return bool(query and query())


def _on_host(tensor: Tensor) -> Tensor:
    """Memory of the host for as much, from which and into which a GPU copies while the host goes on."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True)


def _bytes(tensor: Tensor) -> Any:
    """The tensor's memory as MPI takes it, whatever its dtype: an array, in a third of the time, where it is on the
    host."""
    return _flat(tensor).numpy() if tensor.device.type == "cpu" else _flat(tensor)


def _flat(tensor: Tensor) -> Tensor:
    """The tensor's bytes; mpi4py takes them by DLPack, and waits for no stream."""
    return tensor.view(-1).view(torch.uint8)
