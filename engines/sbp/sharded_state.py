"""Convert parameters and buffers between whole tensors and this rank's shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from math import prod

import numpy as np
import torch
from torch import Tensor

from engines.sbp.block_layout import Digits, Dim, Mesh
from harness.runtime.state_shards import Blocks


@dataclass(frozen=True)
class Cut:
    """Split of one dimension of a tensor. With `heads` its features are (query, key, value) x heads x width in the
    whole tensor, and ordered by head in shards."""

    dim: Dim
    heads: int = 0

    def mine(self, size: int, mesh: Mesh, rank: int) -> np.ndarray:
        """The indices in the whole tensor, in the order of the shard."""
        found = self.dim.mine(size, mesh, rank)
        if not self.heads:
            return found
        return np.arange(size).reshape(3, self.heads, -1).transpose(1, 0, 2).reshape(-1)[found]


@dataclass(frozen=True)
class Shard:
    """Sharding of a tensor of `shape`: its split dimensions, and the digits over which its gradient is all-reduced."""

    shape: tuple[int, ...]
    cuts: Mapping[int, Cut] = field(default_factory=dict)
    sums: Digits = ()
    weight: bool = False

    def of(self, whole: Tensor, mesh: Mesh, rank: int) -> Tensor:
        """A copy of this rank's block."""
        found = whole.detach()
        for n, cut in self.cuts.items():
            found = found.index_select(n, torch.from_numpy(cut.mine(self.shape[n], mesh, rank)).to(found.device))
        return found.clone() if not self.cuts else found

    def blocks(self, own: Tensor, mesh: Mesh, rank: int) -> Blocks:
        """Return this rank's block `own` as parts that lie together in the whole tensor."""
        runs = [
            _runs(self.cuts[n].mine(size, mesh, rank)) if n in self.cuts else [(0, 0, size)]
            for n, size in enumerate(self.shape)
        ]
        found = {}
        for parts in product(*runs):
            offset = torch.Size([first for first, _, _ in parts])
            found[offset] = own[tuple(slice(start, start + length) for _, start, length in parts)]
        return Blocks(own, torch.Size(self.shape), found)

    def whole(self, blocks: Sequence[Tensor], mesh: Mesh) -> Tensor:
        """The tensor from the blocks of all ranks."""
        found = blocks[0].new_empty(self.shape)
        for rank, block in enumerate(blocks):
            indices = [
                torch.from_numpy(self.cuts[n].mine(size, mesh, rank)) if n in self.cuts else torch.arange(size)
                for n, size in enumerate(self.shape)
            ]
            if prod(self.shape) and indices:
                found[torch.meshgrid(*indices, indexing="ij")] = block
            else:
                found = block.clone()
        return found


def _runs(indices: np.ndarray) -> list[tuple[int, int, int]]:
    """The first index, the place and the length of each run: of [4, 5, 0] they are (4, 0, 2) and (0, 2, 1)."""
    places = [0, *(np.flatnonzero(np.diff(indices) != 1) + 1).tolist(), len(indices)]
    return [(int(indices[start]), start, stop - start) for start, stop in pairwise(places) if stop > start]
