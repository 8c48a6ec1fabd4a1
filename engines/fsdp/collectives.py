"""The collectives that `fully_shard` issues: torch's own, timed and counted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# The first names are those of torch 2.13; the others warn there, and are the only ones before.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Tally:
    """By algorithm, what this rank's collectives took and how large their buffers were, since it was taken."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.bytes: Counter[str] = Counter()

    @contextmanager
    def counting(self, algorithm: str, whole: Tensor) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[algorithm] = self.seconds.get(algorithm, 0.0) + time.perf_counter() - began
        self.bytes[algorithm] += whole.numel() * whole.element_size()

    def take_seconds(self, algorithm: str) -> float:
        return self.seconds.pop(algorithm, 0.0)

    def take_bytes(self) -> Counter[str]:
        taken, self.bytes = self.bytes, Counter()
        return taken


class Gather:
    """For `FSDPModule.set_custom_all_gather`: shards -> the whole."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        with self.tally.counting("all_gather", output_tensor):
            return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


class Scatter:
    """For `FSDPModule.set_custom_reduce_scatter`: whole gradients -> the sum of a shard.

    `resharded` is called when the weights are freed, and the buffer for their gradients is not there yet.
    """

    def __init__(self, tally: Tally, resharded: Callable[[], None]) -> None:
        self.tally, self.resharded = tally, resharded

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
        with self.tally.counting("reduce_scatter", input_tensor):
            return reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
