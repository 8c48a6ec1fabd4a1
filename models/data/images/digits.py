"""Handwritten digits to classify: 1797 images of 8 x 8 pixels, which ship with scikit-learn."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

from models.data.images.image_pool import Pool

BRIGHTEST = 16


def read(height: int, width: int) -> Pool:
    """All digits, grey, bright on dark, enlarged to `height` x `width`. They are never mirrored."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.stack([_enlarged(digit, height, width) for digit in grey(digits.images)])
    return Pool(torch.from_numpy(images[:, None]), torch.from_numpy(digits.target.astype(np.int64)), mirrored=False)


def grey(images: np.ndarray) -> np.ndarray:
    """scikit-learn's 0..16 as uint8, 0..255."""
    return (images * 255 / BRIGHTEST).astype(np.uint8)


def _enlarged(digit: np.ndarray, height: int, width: int) -> np.ndarray:
    return np.asarray(Image.fromarray(digit).resize((width, height), Image.Resampling.BILINEAR))
