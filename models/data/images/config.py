"""The keys of `data=images`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.interfaces import Model
from harness.problem import CannotRun, Problem
from models.data.images import listing

if TYPE_CHECKING:
    from models.data.images.images import Images


@dataclass
class Config:
    """Real images for segmentation: those that ship with scikit-learn, or the user's own folder."""

    name: str = "images"
    """The data set: models/data/images."""
    folder: str | None = None
    """Your images; NAME_mask.png beside NAME.png is its target. Null: handwritten digits on photographs."""


def build(config: Config, model: Model, seed: int) -> Images:
    """Read or draw all images once. Raises `harness.problem.CannotRun` where model or folder don't fit."""
    if model.task != "segmentation":
        raise CannotRun([Problem("data images", f"is for segmentation, {model.name} does {model.task}",
                                 "data=synthetic, or model=unet")])  # fmt: skip
    from models.data.images import digits, folder
    from models.data.images.images import Images

    _, height, width = model.input_shape
    if config.folder is None:
        return Images(digits.draw(height, width, seed), seed)
    return Images(folder.read(config.folder, height, width), seed)


def check(config: Config) -> None:
    """Raise ValueError, as `key   what   -> mend`, if the folder does not exist or holds no image."""
    if config.folder is None:
        return
    try:
        listing.find(config.folder)
    except CannotRun as error:
        lines = [f"{problem.key}   {problem.what}   -> {problem.mend}" for problem in error.problems]
        raise ValueError("\n".join(lines)) from error
