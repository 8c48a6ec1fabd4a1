"""Messages between stages: each rank's blocks go to the rank with the same shard."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from harness.core.op import Op
from harness.runtime.stage_passes import DTYPES

LARGEST = 8
"""Dimensions of a message."""


class StageP2P:
    """Sends and receives values of one or several tensors. The first of each kind has its shapes before it."""

    def __init__(self, rank: int, place: int, tensor: int, device: torch.device) -> None:
        self.rank, self.place, self.tensor, self.device = rank, place, tensor, device
        self.known: dict[tuple[int, str, bool], list[tuple[list[int], torch.dtype]]] = {}

    def send(self, op: Op, tensors: list[Tensor]) -> int:
        """The bytes that were sent."""
        key, peer = (op.peer or 0, op.part, op.forward), self._peer(op)
        if key not in self.known:
            self.known[key] = [(list(tensor.shape), tensor.dtype) for tensor in tensors]
            self._report([len(tensors)], peer)
            for shape, dtype in self.known[key]:
                self._report([DTYPES.index(dtype), len(shape), *shape], peer)
        for tensor in tensors:
            dist.send(tensor.contiguous(), peer)
        return sum(tensor.nbytes for tensor in tensors)

    def receive(self, op: Op) -> list[Tensor]:
        key, peer = (op.peer or 0, op.part, op.forward), self._peer(op)
        if key not in self.known:
            count = self._hear(peer)[0]
            heard = [self._hear(peer) for _ in range(count)]
            self.known[key] = [(numbers[2 : 2 + numbers[1]], DTYPES[numbers[0]]) for numbers in heard]
        tensors = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in self.known[key]]
        for tensor in tensors:
            dist.recv(tensor, peer)
        return tensors

    def _report(self, numbers: list[int], peer: int) -> None:
        filled = numbers + [0] * (LARGEST + 2 - len(numbers))
        dist.send(torch.tensor(filled, dtype=torch.long, device=self.device), peer)

    def _hear(self, peer: int) -> list[int]:
        header = torch.zeros(LARGEST + 2, dtype=torch.long, device=self.device)
        dist.recv(header, peer)
        numbers: list[int] = header.tolist()
        return numbers

    def _peer(self, op: Op) -> int:
        assert op.peer is not None
        return self.rank + (op.peer - self.place) * self.tensor
