"""The passes of a stage's micro-batches, and its messages: each rank's blocks go to the rank with the same shard."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.op import Op
from harness.stage_module import StageModule

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LARGEST = 8
"""Dimensions of a message."""


class Neighbours:
    """Sends and receives values of one or several tensors. The first of each kind has its shapes before it."""

    def __init__(self, rank: int, place: int, tensor: int, device: torch.device) -> None:
        self.rank, self.place, self.tensor, self.device = rank, place, tensor, device
        self.known: dict[tuple[int, str, bool], list[tuple[list[int], torch.dtype]]] = {}

    def send(self, op: Op, tensors: list[Tensor]) -> int:
        """The bytes that were sent."""
        key, peer = (op.peer or 0, op.part, op.forward), self._peer(op)
        if key not in self.known:
            self.known[key] = [(list(tensor.shape), tensor.dtype) for tensor in tensors]
            self._tell([len(tensors)], peer)
            for shape, dtype in self.known[key]:
                self._tell([DTYPES.index(dtype), len(shape), *shape], peer)
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

    def _tell(self, numbers: list[int], peer: int) -> None:
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


class Passes:
    """One step. What waits: inputs and outputs for their backward pass, gradients for their way.

    Values are lists of tensors by their part: "" is what goes from layer to layer, others are skips.
    """

    def __init__(self, stage: StageModule, neighbours: Neighbours) -> None:
        self.stage, self.neighbours = stage, neighbours
        self.inputs: dict[int, dict[str, list[Tensor]]] = {}
        self.outputs: dict[int, dict[str, list[Tensor]]] = {}
        self.gradients: dict[int, dict[str, list[Tensor]]] = {}

    def forward(self, i: int, entering: Tensor | None) -> None:
        """`entering` is the model's own input."""
        own = [entering] if entering is not None else self._flat(self.inputs[i], self.stage.arriving)
        out: Any = self.stage(*own)
        flat = [out] if isinstance(out, Tensor) else list(out)
        skips = self.stage.leaving
        several = len(flat) - len(skips)
        jumps = {name: [tensor] for name, tensor in zip(skips, flat[several:], strict=True)}
        self.outputs[i] = {"": flat[:several], **jumps}

    def backward(self, i: int, loss: Tensor | None) -> None:
        """From the loss, or from the gradients that have arrived."""
        outputs = self._flat(self.outputs.pop(i), self.stage.leaving)
        if loss is not None:
            loss.backward()
        else:
            torch.autograd.backward(outputs, self._flat(self.gradients.pop(i), self.stage.leaving))

    @staticmethod
    def _flat(values: dict[str, list[Tensor]], skips: list[str]) -> list[Tensor]:
        return [tensor for part in ("", *skips) for tensor in values[part]]

    def message(self, op: Op) -> int:
        """Run a send or a receive; the bytes that were sent."""
        assert op.micro_batch is not None
        i = op.micro_batch
        if op.kind == "recv":
            tensors = self.neighbours.receive(op)
            values = self.inputs if op.forward else self.gradients
            values.setdefault(i, {})[op.part] = [t.requires_grad_() for t in tensors] if op.forward else tensors
            return 0
        return self.neighbours.send(op, self._leaving(op, i))

    def _leaving(self, op: Op, i: int) -> list[Tensor]:
        if op.forward:
            return [tensor.detach() for tensor in self.outputs[i][op.part]]
        entered = self.inputs[i].pop(op.part)
        return [one.grad if one.grad is not None else torch.zeros_like(one) for one in entered]
