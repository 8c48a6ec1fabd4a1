"""Reduce-scatter and all-gather whose parts go straight to whom they are for. On GPUs NCCL runs its own.

    reduce_scatter, rank 0 of 3   part 1 --> rank 1, part 2 --> rank 2;  its share: the sum of all parts 0
    all_gather, rank 0 of 3       its share --> rank 1, rank 2;          theirs <--

torch's reduce-scatter on gloo is an all-reduce inside and sends twice the bytes that it has to; its all-gather sends
as many as this one. With 4 MiB on two ranks these take 0.4 and 0.6 of the time. Shares are summed in the order of
ranks, on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.runtime import collectives


def on_gloo(tensor: Tensor) -> bool:
    """Returns whether gloo sends a tensor: in any order and both ways at once, where NCCL has one order for a pair."""
    return tensor.device.type == "cpu"


def reduce_scatter(share: Tensor, whole: Tensor, group: Any = None) -> None:
    """`share`, (n,), gets its part of the sum of all members' `whole`, (members * n,)."""
    if not on_gloo(share):
        collectives.reduce_scatter(share, whole, group=group)
        return
    arrived = torch.empty_like(whole)
    collectives.all_to_all(arrived, whole, group=group)
    first, second, *others = arrived.view(-1, len(share))
    torch.add(first, second, out=share)
    for other in others:
        share.add_(other)


def all_gather(whole: Tensor, share: Tensor, group: Any = None) -> None:
    """`whole`, (members * n,), gets all members' `share`, (n,), in the order of ranks."""
    if not on_gloo(share):
        collectives.all_gather(whole, share, group=group)
        return
    own, parts = dist.get_rank(group), whole.view(-1, len(share))
    others = [rank for rank in range(len(parts)) if rank != own]
    works = [dist.irecv(parts[rank], group=group, group_src=rank) for rank in others]
    works += [dist.isend(share, group=group, group_dst=rank) for rank in others]
    parts[own].copy_(share)
    for work in works:
        assert work is not None  # None is for those outside of the group
        work.wait()
