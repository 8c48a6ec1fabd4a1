"""Batches from a pool of images that is held in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from harness.interfaces import Batch


@dataclass(frozen=True)
class Pool:
    """n images, uint8 (n, 3, height, width), and for each pixel whether it belongs to the object, (n, 1, ...)."""

    images: Tensor
    masks: Tensor

    @staticmethod
    def stack(images: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> Pool:
        """From uint8 (height, width, 3) and bool (height, width) arrays."""
        return Pool(torch.from_numpy(np.stack(images).transpose(0, 3, 1, 2).copy()),
                    torch.from_numpy(np.stack(masks)[:, None]))  # fmt: skip


class Images:
    """Implements `harness.interfaces.Data` for segmentation.

    Steps walk through the pool epoch by epoch: each image comes once in an epoch, in an order drawn from (seed,
    epoch); half of the images of a step, drawn from (seed, step), are mirrored.
    """

    def __init__(self, pool: Pool, seed: int) -> None:
        self.pool = pool
        self._seed = seed

    def batch(self, step: int, size: int) -> Batch:
        """Inputs (size, 3, height, width) in -1..1 and targets (size, 1, height, width) of 0 and 1, both float32."""
        chosen = self._chosen(step * size, size)
        mirrored = torch.rand(size, generator=_generator("mirror", self._seed, step)) < 0.5
        inputs, targets = self.pool.images[chosen], self.pool.masks[chosen]
        for tensor in (inputs, targets):
            tensor[mirrored] = tensor[mirrored].flip(-1)
        return Batch(inputs.float().div_(127.5).sub_(1), targets.float())

    def _chosen(self, first: int, size: int) -> Tensor:
        """
        samples   first .. first + size - 1
        epochs    |--- n images ---|--- n images ---|--- ...       a batch may reach over several
        """
        n = len(self.pool.images)
        epochs = range(first // n, (first + size - 1) // n + 1)
        order = [torch.randperm(n, generator=_generator("order", self._seed, epoch)) for epoch in epochs]
        return torch.cat(order)[first % n :][:size]


def _generator(*key: str | int) -> torch.Generator:
    """A generator of its own for each key; near keys give unrelated numbers."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
