"""The collectives that `fully_shard` issues: torch's own, timed and counted.

CPU              |= all_gather =|= layer =|                        the call itself holds up the rank
GPU, gather      |= all_gather =|= all_gather =|
     compute     |    waits     |= layer =|    |= layer =|         what counts is how long the layers wait
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
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
        with _counted(self.counter, "all_gather", output_tensor):
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
        with _counted(self.counter, "reduce_scatter", input_tensor):
            return reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def _counted(counter: CollectiveCounter, algorithm: str, buffer: Tensor) -> AbstractContextManager[None]:
    if buffer.device.type == "cpu":
        return counter.counting(algorithm, buffer.nbytes)
    counter.sent(algorithm, buffer.nbytes)
    return nullcontext()


def time_waits(group: Any, counter: CollectiveCounter) -> None:
    """Count how long the layers of a group of `fully_shard` wait on a GPU: for weights, and for sums at the end."""
    unshard, finalize = group.wait_for_unshard, group.finalize_backward

    def wait_for_unshard() -> None:
        gathered = group._all_gather_result
        if gathered is not None and gathered.all_gather_event is not None:
            with counter.counting("all_gather"):
                torch.cuda.current_stream().wait_event(gathered.all_gather_event)
        unshard()

    def finalize_backward() -> None:
        with counter.counting("reduce_scatter"):
            finalize()

    group.wait_for_unshard, group.finalize_backward = wait_for_unshard, finalize_backward
