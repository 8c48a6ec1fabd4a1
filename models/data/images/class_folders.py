"""The user's own images to classify: a folder in data.folder for each class.

    flowers/daisy/a.jpg         class 0: the classes are numbered in the order of their names
    flowers/daisy/b.png
    flowers/tulip/c.webp        class 1

Images are resized to the model's input (the proportions of other shapes change). All of them are held in memory, a
byte for each channel of each pixel of the model's input.
"""

from __future__ import annotations

import numpy as np
import torch

from models.data.images.image_pool import Pool
from models.data.images.listing import classes, classes_problem
from models.data.images.picture import resized
from models.data.images.skipped_files import LeftOut


def read(folder: str, channels: int, height: int, width: int) -> Pool:
    """Every readable image of each class at `height` x `width`, in colours (3 channels) or grey (1).

    Warns of images that are left out because they are broken. Raises `harness.core.problem.CannotRun` if there is no
    such folder, it has less than two classes, or one of them without an image that can be used.
    """
    found = classes(folder)
    count = sum(map(len, found.values()))
    images = np.empty((count, channels, height, width), np.uint8)
    targets: list[int] = []
    left_out = LeftOut()
    for number, (name, files) in enumerate(found.items()):
        for file in files:
            try:
                picture = resized(file, "RGB" if channels == 3 else "L", height, width)
            except Exception as error:  # decoders raise whatever they like on a broken file
                left_out.broken(f"{name}/{file.name}", error)
                continue
            images[len(targets)] = np.asarray(picture).reshape(height, width, channels).transpose(2, 0, 1)
            targets.append(number)
    used = set(targets)
    empty = [name for number, name in enumerate(found) if number not in used]
    if empty:
        raise classes_problem(folder, f"class {', '.join(empty)} has 0 images that can be used: {left_out}")
    left_out.warn(folder, count)
    return Pool(torch.from_numpy(images[: len(targets)]), torch.tensor(targets), mirrored=True)
