"""Handwritten digits on photographs: find the ink. Both ship with scikit-learn, so no download is needed."""

from __future__ import annotations

from random import Random

import numpy as np
from PIL import Image

from models.data.images.digits import grey
from models.data.images.image_pool import Pool

POOL = 256
"""Images in the pool."""


def draw(height: int, width: int, seed: int) -> Pool:
    """Random crops of two photographs with a few digits written on each; the mask is where their ink is."""
    from sklearn.datasets import load_digits, load_sample_images

    random = Random(seed)
    photographs = [Image.fromarray(photograph) for photograph in load_sample_images().images]
    digits = [Image.fromarray(digit) for digit in grey(load_digits().images)]
    pairs = [_write(_crop(random.choice(photographs), height, width, random), digits, random) for _ in range(POOL)]
    return Pool.of_masks([image for image, _ in pairs], [mask for _, mask in pairs])


def _crop(photograph: Image.Image, height: int, width: int, random: Random) -> Image.Image:
    """A square of a quarter to the whole of the photograph's height, resized."""
    side = random.randint(photograph.height // 4, photograph.height)
    left, top = random.randint(0, photograph.width - side), random.randint(0, photograph.height - side)
    return photograph.resize((width, height), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))


def _write(image: Image.Image, digits: list[Image.Image], random: Random) -> tuple[np.ndarray, np.ndarray]:
    """Two to five digits, each in a bright colour of its own and a quarter to a half of the image high."""
    ink = Image.new("L", image.size)
    shorter = min(image.size)
    for _ in range(random.randint(2, 5)):
        side = random.randint(shorter // 4, shorter // 2)
        stamp = random.choice(digits).resize((side, side), Image.Resampling.BICUBIC)
        corner = random.randint(0, image.width - side), random.randint(0, image.height - side)
        colour = tuple(random.randint(128, 255) for _ in range(3))
        image.paste(colour, corner, stamp)
        ink.paste(255, corner, stamp)
    return np.asarray(image), np.asarray(ink) > 127
