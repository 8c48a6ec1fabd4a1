"""The collectives that `fully_shard` issues: torch's own, timed and counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.runtime.collectives import CollectiveCounter, all_gather, reduce_scatter


class TracedAllGather:
    """A traced all-gather for `FSDPModule.set_custom_all_gather`: shards -> the whole tensor."""

    def __init__(self, counter: CollectiveCounter) -> None:
        self.counter = counter

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        with self.counter.counting("all_gather", output_tensor.nbytes):
            return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


class TracedReduceScatter:
    """A traced reduce-scatter for `FSDPModule.set_custom_reduce_scatter`: full gradients -> the sum of one shard.

    `resharded` is called when the weights are freed, and the buffer for their gradients is not there yet.
    """

    def __init__(self, counter: CollectiveCounter, resharded: Callable[[], None]) -> None:
        self.counter, self.resharded = counter, resharded

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.resharded()
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        with self.counter.counting("reduce_scatter", input_tensor.nbytes):
            return reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
