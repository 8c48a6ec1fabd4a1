"""Reduce-scatter and all-gather sent straight: among all members and among some, to the last bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.launch import forked_ranks
from harness.runtime import direct_collectives

NUMBERS = 5


def filled(rank: int, dtype: torch.dtype, members: int) -> Tensor:
    """Numbers whose sums depend on the order in which they are added."""
    return torch.randn(members * NUMBERS, generator=torch.Generator().manual_seed(rank)).to(dtype)


def collected(first: int, members: int, dtype: torch.dtype) -> list[Tensor]:
    """In a rank that is a member: its share of the sum, and all members' first numbers."""
    group = dist.new_group(list(range(first, first + members)))
    own = dist.get_rank()
    if own < first:
        return []
    whole, share = filled(own, dtype, members), torch.empty(NUMBERS, dtype=dtype)
    direct_collectives.reduce_scatter(share, whole, group)
    gathered = torch.empty_like(whole)
    direct_collectives.all_gather(gathered, whole[:NUMBERS].clone(), group)
    return [share, gathered]


@pytest.mark.parametrize(("first", "members"), [(0, 2), (0, 4), (1, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shares_are_sums_in_the_order_of_ranks_and_gathered_in_it(first: int, members: int, dtype: torch.dtype) -> None:
    count = first + members

    def work() -> list[list[Tensor]]:
        found: list[list[Tensor]] = [[]] * count
        dist.all_gather_object(found, collected(first, members, dtype))
        return found

    reported = forked_ranks.run_on_ranks(count, work, ("cpu",) * count)
    wholes = [filled(rank, dtype, members) for rank in range(first, count)]
    total = wholes[0]
    for whole in wholes[1:]:
        total = total + whole
    for n, (share, gathered) in enumerate(reported[first:]):
        assert torch.equal(share, total[n * NUMBERS : (n + 1) * NUMBERS])
        assert torch.equal(gathered, torch.cat([whole[:NUMBERS] for whole in wholes]))
