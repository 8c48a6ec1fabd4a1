"""Batches from a pool of images."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.interfaces import Batch, Model
from models.data.images.config import Config, load_pool
from models.data.images.image_pool import Pool
from models.data.shuffled_epochs import Walk, generator


class Images:
    """Implements `harness.interfaces.Data` for segmentation and for classification.

    Steps walk through the pool epoch by epoch, each time in another order. Where the pool allows it half of the
    images of a step, drawn from (seed, step), are mirrored. `shape` is that of one sample: (channels, height, width),
    where the images of a grey pool are repeated for each channel, or (height * width,).
    """

    def __init__(self, pool: Pool, shape: tuple[int, ...], seed: int) -> None:
        self.pool = pool
        self._shape = shape
        self._seed = seed
        self._walk = Walk(len(pool.images), seed)

    def batch(self, step: int, size: int) -> Batch:
        """Inputs (size, *shape) of float32 in -1..1; targets are masks (size, 1, height, width) of 0 and 1, float32,
        or classes (size,) of int64."""
        chosen = self._walk.chosen(step * size, size)
        inputs, targets = self.pool.images[chosen], self.pool.targets[chosen]
        masks = targets.dtype == torch.bool
        if self.pool.mirrored:
            mirrored = torch.rand(size, generator=generator("mirror", self._seed, step)) < 0.5
            for tensor in (inputs, targets) if masks else (inputs,):
                tensor[mirrored] = tensor[mirrored].flip(-1)
        return Batch(self._shaped(inputs).float().div_(127.5).sub_(1), targets.float() if masks else targets)

    def _shaped(self, images: Tensor) -> Tensor:
        if len(self._shape) == 1:
            return images.flatten(1)
        return images.expand(-1, self._shape[0], -1, -1)


def build(config: Config, model: Model, seed: int) -> Images:
    """Raises `harness.core.problem.CannotRun` where the model does not fit."""
    return Images(load_pool(config, model, seed), model.input_shape, seed)
