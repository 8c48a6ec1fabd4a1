"""Messages by MPI: Isend, Irecv, and a thread that completes them while the rank computes.

    main      | -------- F3 -------- | arrived | ------- B1 ------- |    (nothing to do: it polls itself)
    thread     .    .    .    .    .            .    .    .    .    .     polls

MPI moves a large message only while somebody calls it. Nothing here blocks in MPI: a blocked call would spin.
"""

from __future__ import annotations

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
    """Requests of one send or receive. `held` are what the requests read or write; `target` where it is to go."""

    channel: Channel
    micro_batch: int
    held: list[Tensor]
    target: list[Tensor]
    left: int


class MPITransport(Transport):
    """Messages over the MPI world of `harness.launch.mpi`, whose ranks are those of the group. GPU tensors pass through
    the host."""

    def __init__(
        self, position: Position, channels: Sequence[Channel], micro_batches: int, device: torch.device
    ) -> None:
        super().__init__(position, channels, micro_batches, device)
        self._world = MPI.COMM_WORLD.Dup()
        self._pause_s = BUSY_S if _shares_memory(self._world) else FAR_S
        self._lock = threading.Lock()
        self._requests: list[MPI.Request] = []
        self._owners: list[_Transfer] = []
        self._done: deque[tuple[_Transfer, float]] = deque()
        self._error: Exception | None = None
        self._computing = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._poll, name="mpi", daemon=True)
        self._thread.start()

    def _send(self, channel: Channel, micro_batch: int, tensors: list[Tensor]) -> None:
        held = [tensor.cpu() for tensor in tensors]
        peer, tag = self.position.peer(channel.target), self.tag(channel, micro_batch)
        with self._lock:
            requests = [self._world.Isend(_bytes(tensor), peer, tag) for tensor in held]
            self._add(requests, _Transfer(channel, micro_batch, held, [], len(held)))
        self._computing.set()

    def _receive(self, channel: Channel, micro_batch: int, buffers: list[Tensor]) -> None:
        on_host = self.device.type == "cpu"
        held = buffers if on_host else [torch.empty_like(one, device="cpu", pin_memory=True) for one in buffers]
        peer, tag = self.position.peer(channel.source), self.tag(channel, micro_batch)
        with self._lock:
            requests = [self._world.Irecv(_bytes(tensor), peer, tag) for tensor in held]
            self._add(requests, _Transfer(channel, micro_batch, held, buffers, len(held)))
        self._computing.set()

    def _add(self, requests: list[MPI.Request], transfer: _Transfer) -> None:
        self._requests += requests
        self._owners += [transfer] * len(requests)

    def _completed(self, wait: bool) -> list[Completed]:
        self._progress()
        if wait and not self._done:
            self._until(lambda: bool(self._done), "a message")
        found = []
        while self._done:
            transfer, at_s = self._done.popleft()
            for tensor, held in zip(transfer.target, transfer.held, strict=True):
                if held is not tensor:
                    tensor.copy_(held)
            found.append(Completed(transfer.channel, transfer.micro_batch, at_s))
        return found

    def finish(self) -> None:
        self._until(lambda: not self._requests, "its messages to leave")
        self._computing.clear()

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


def _bytes(tensor: Tensor) -> Any:
    """The tensor's memory as MPI takes it, whatever its dtype."""
    return tensor.view(-1).view(torch.uint8).numpy()
