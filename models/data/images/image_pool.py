"""Images that are held in memory, with what they show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Pool:
    """n images, uint8 (n, channels, height, width), and what each is to give.

    `targets`: for each pixel whether it belongs to the object, bool (n, 1, height, width); or a class for each image,
    int64 (n,). `mirrored`: whether an image means the same when left and right are swapped.
    """

    images: Tensor
    targets: Tensor
    mirrored: bool

    @staticmethod
    def of_masks(images: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> Pool:
        """Photographs, from uint8 (height, width, 3) and bool (height, width) arrays."""
        return Pool(
            torch.from_numpy(np.stack(images).transpose(0, 3, 1, 2).copy()),
            torch.from_numpy(np.stack(masks)[:, None]),
            mirrored=True,
        )
