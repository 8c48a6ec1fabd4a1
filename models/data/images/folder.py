"""The user's own folder of images to segment, and masks where there are some.

    cat.jpg   cat_mask.png      the mask is the target: a pixel above half of the mask's brightest belongs to the object
    dog.png                     has no mask: left out, because others have one
    sky.webp                    if no image of the folder has a mask: the target is what is brighter than the median

Images are read from the folder itself, not from folders in it, and resized to the model's input (the proportions of
other shapes change). All of them are held in memory, 4 bytes for each pixel of the model's input.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from models.data.images.image_pool import Pool
from models.data.images.listing import find, problem
from models.data.images.picture import opened, resized
from models.data.images.skipped_files import LeftOut


def read(folder: str, height: int, width: int) -> Pool:
    """Every readable image of `folder` at `height` x `width`.

    Warns of images that are left out: broken ones, and those without a mask in a folder that has masks. Raises
    `harness.core.problem.CannotRun` if there is no such folder, no image in it, or none that can be used.
    """
    files = find(folder)
    masked = any(files.values())
    pairs, left_out = [], LeftOut()
    for file, mask in files.items():
        if masked and mask is None:
            left_out.bare(file.name)
            continue
        try:
            pairs.append(_pair(file, mask, height, width))
        except Exception as error:  # decoders raise whatever they like on a broken file
            left_out.broken(file.name, error)
    if not pairs:
        raise problem(folder, f"holds {len(files)} images, 0 of them can be used: {left_out}")
    left_out.warn(folder, len(files))
    return Pool.of_masks([image for image, _ in pairs], [mask for _, mask in pairs])


def _pair(file: Path, mask: Path | None, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The image, (height, width, 3), and its target, (height, width)."""
    image = resized(file, "RGB", height, width)
    if mask is None:
        grey = np.asarray(image.convert("L"))
        return np.asarray(image), grey > np.median(grey)
    level = np.asarray(opened(mask, height, width).convert("L").resize((width, height), Image.Resampling.NEAREST))
    return np.asarray(image), level > level.max() / 2
