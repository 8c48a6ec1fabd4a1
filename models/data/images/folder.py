"""The user's own folder of images, and masks where there are some.

    cat.jpg   cat_mask.png      the mask is the target: a pixel above half of the mask's brightest belongs to the object
    dog.png                     has no mask: left out, because others have one
    sky.webp                    if no image of the folder has a mask: the target is what is brighter than the median

Images are read from the folder itself, not from folders in it, and resized to the model's input (the proportions of
other shapes change). All of them are held in memory, 4 bytes for each pixel of the model's input.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from models.data.images.images import Pool
from models.data.images.listing import FORMATS, find, problem


def read(folder: str, height: int, width: int) -> Pool:
    """Every readable image of `folder` at `height` x `width`.

    Warns of images that are left out: broken ones, and those without a mask in a folder that has masks. Raises
    `harness.problem.CannotRun` if there is no such folder, no image in it, or none that can be used.
    """
    files = find(folder)
    masked = any(files.values())
    pairs, broken, bare = [], [], []
    for file, mask in files.items():
        if masked and mask is None:
            bare.append(file.name)
            continue
        try:
            pairs.append(_pair(file, mask, height, width))
        except Exception as error:  # decoders raise whatever they like on a broken file
            broken.append(f"{file.name} ({type(error).__name__})")
    left_out = _left_out(broken, bare)
    if not pairs:
        raise problem(folder, f"holds {len(files)} images, 0 of them can be used: {left_out}")
    if left_out:
        missing = f"{len(files) - len(pairs)} of {len(files)} images are left out"
        warnings.warn(f"data.folder {folder}: {missing}: {left_out}", stacklevel=2)
    return Pool.stack([image for image, _ in pairs], [mask for _, mask in pairs])


def _left_out(broken: Sequence[str], bare: Sequence[str]) -> str:
    parts = [
        f"{len(names)} {why}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
        for names, why in ((broken, "cannot be read"), (bare, "without a mask"))
        if names
    ]
    return "; ".join(parts)


def _pair(file: Path, mask: Path | None, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The image, (height, width, 3), and its target, (height, width)."""
    image = _opened(file, height, width).convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
    if mask is None:
        grey = np.asarray(image.convert("L"))
        return np.asarray(image), grey > np.median(grey)
    level = np.asarray(_opened(mask, height, width).convert("L").resize((width, height), Image.Resampling.NEAREST))
    return np.asarray(image), level > level.max() / 2


def _opened(file: Path, height: int, width: int) -> Image.Image:
    """At least of that size if the file is; greys of more than 8 bits become darkest..brightest = 0..255."""
    with Image.open(file, formats=tuple(FORMATS)) as image:
        image.draft(None, (width, height))  # a large JPEG need not be decoded in full
        image.load()
    if image.mode[0] not in "IF":
        return image
    values = np.asarray(image, dtype=np.float64)
    spread = np.ptp(values) or 1.0
    return Image.fromarray(((values - values.min()) * 255 / spread).astype(np.uint8))
