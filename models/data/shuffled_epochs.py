"""The walk through samples that are held in memory: epoch by epoch, each time in another order."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


class Walk:
    """The order in which `samples` samples are drawn: each once in an epoch, shuffled by (seed, epoch).

    place     first .. first + count - 1
    epochs    |--- samples ---|--- samples ---|--- ...      a batch may reach over several
    """

    def __init__(self, samples: int, seed: int) -> None:
        self._samples = samples
        self._seed = seed
        self._orders: dict[int, Tensor] = {}

    def chosen(self, first: int, count: int) -> Tensor:
        """The samples at the places `first` to `first + count - 1` of the walk, (count,) of int64.

        A pure function; the orders of the epochs that it last went through are kept, since drawing them takes time.
        """
        epochs = range(first // self._samples, (first + count - 1) // self._samples + 1)
        self._orders = {epoch: self._order(epoch) for epoch in epochs}
        return torch.cat(list(self._orders.values()))[first % self._samples :][:count]

    def _order(self, epoch: int) -> Tensor:
        if epoch in self._orders:
            return self._orders[epoch]
        return torch.randperm(self._samples, generator=generator("order", self._seed, epoch))


def generator(*key: str | int) -> torch.Generator:
    """A generator of its own for each key; near keys give unrelated numbers."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
