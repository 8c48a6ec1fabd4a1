"""The keys of `data=images`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.interfaces import Model
from harness.problem import CannotRun, Problem
from models.data.images import listing

if TYPE_CHECKING:
    from models.data.images.images import Images
    from models.data.images.pool import Pool

GREY, RGB = 1, 3
DIGITS = 10
"""Classes of the digits that ship with scikit-learn."""


@dataclass
class Config:
    """Real images to segment or to classify: those that ship with scikit-learn, or the user's own folder."""

    name: str = "images"
    """The data set: models/data/images."""
    folder: str | None = None
    """Your images, with NAME_mask.png beside NAME.png or a folder for each class. Null: handwritten digits."""


def build(config: Config, model: Model, seed: int) -> Images:
    """Read or draw all images once. Raises `harness.problem.CannotRun` where model or folder don't fit."""
    if wrong := _task(model.task, model.name):
        raise CannotRun(wrong)
    if wrong := [*_shape(model), *_classes(config, model)]:
        raise CannotRun(wrong)
    from models.data.images.images import Images

    pool = _masked(config, model, seed) if model.task == "segmentation" else _classified(config, model)
    return Images(pool, model.input_shape, seed)


def check(config: Config) -> None:
    """Raise ValueError, as `key   what   -> mend`, if the folder does not exist or holds no image."""
    if config.folder is None:
        return
    try:
        listing.check(config.folder)
    except CannotRun as error:
        lines = [f"{problem.key}   {problem.what}   -> {problem.mend}" for problem in error.problems]
        raise ValueError("\n".join(lines)) from error


def suits(config: Config, task: str, model: Any) -> None:
    """Raise ValueError, as `check` does, if the model that these keys describe is not for images, or for fewer classes
    than there are."""
    wrong = _task(task, model.name)
    try:
        if task == "classification" and hasattr(model, "classes"):
            wrong = _too_few(config, model.classes, f"model.classes={_there(config)}")
    except CannotRun as error:  # what the folder lacks for classes
        wrong = list(error.problems)
    if wrong:
        raise ValueError("\n".join(f"{problem.key}   {problem.what}   -> {problem.mend}" for problem in wrong))


def _task(task: str, model: str) -> list[Problem]:
    if task in ("segmentation", "classification"):
        return []
    what = f"is for segmentation and classification, {model} does {task}"
    return [Problem("data images", what, "data=text, or data=synthetic")]


def _shape(model: Model) -> list[Problem]:
    """Models take colour images; classifiers may also take n numbers, which are a square of grey ones."""
    shape = model.input_shape
    if len(shape) == 3 and shape[0] == RGB:
        return []
    if len(shape) > 1 or model.task != "classification":
        what = f"takes samples of {' x '.join(map(str, shape))}, images are {RGB} x height x width"
        return [Problem(f"model {model.name}", what, "data=synthetic")]
    side = _side(model)
    if side**2 == shape[0]:
        return []
    what = f"takes {shape[0]} numbers, an image of {side} x {side} has {side**2}"
    return [Problem(f"model {model.name}", what, f"model.widths=[{side**2},...], or data=synthetic")]


def _classes(config: Config, model: Model) -> list[Problem]:
    """A classifier must be able to tell as many classes apart as there are."""
    if model.task != "classification":
        return []
    there = _there(config)
    mend = f"model.classes={there}" if len(model.input_shape) > 1 else f"model.widths=[...,{there}]"
    return _too_few(config, model.classes, mend)


def _there(config: Config) -> int:
    return DIGITS if config.folder is None else len(listing.classes(config.folder))


def _too_few(config: Config, classes: int, mend: str) -> list[Problem]:
    there = _there(config)
    who = "the digits have" if config.folder is None else f"data.folder {config.folder} has"
    return [] if there <= classes else [Problem(f"model.classes {classes}", f"{who} {there} classes", mend)]


def _side(model: Model) -> int:
    """Of the square that is nearest to the model's n numbers."""
    return round(math.sqrt(model.input_shape[0]))


def _masked(config: Config, model: Model, seed: int) -> Pool:
    from models.data.images import folder, scenes

    _, height, width = model.input_shape
    if config.folder is None:
        return scenes.draw(height, width, seed)
    return folder.read(config.folder, height, width)


def _classified(config: Config, model: Model) -> Pool:
    from models.data.images import class_folders, digits

    channels, height, width = model.input_shape if len(model.input_shape) == 3 else (GREY, _side(model), _side(model))
    if config.folder is None:
        return digits.read(height, width)
    return class_folders.read(config.folder, channels, height, width)
