"""Read one picture from a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from models.data.images.listing import FORMATS


def opened(file: Path, height: int, width: int) -> Image.Image:
    """At least of that size if the file is; greys of more than 8 bits become darkest..brightest = 0..255.

    Raises whatever Pillow and its decoders raise on a broken file.
    """
    with Image.open(file, formats=tuple(FORMATS)) as image:
        image.draft(None, (width, height))  # a large JPEG need not be decoded in full
        image.load()
    if image.mode[0] not in "IF":
        return image
    values = np.asarray(image, dtype=np.float64)
    spread = np.ptp(values) or 1.0
    return Image.fromarray(((values - values.min()) * 255 / spread).astype(np.uint8))


def resized(file: Path, mode: str, height: int, width: int) -> Image.Image:
    """The picture in `mode` ("RGB" or "L") at exactly that size; the proportions of other shapes change."""
    return opened(file, height, width).convert(mode).resize((width, height), Image.Resampling.BILINEAR)
