"""The keys of `data=images`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from harness.core.problem import CannotRun, Problem, refuse
from harness.interfaces import Model
from models.data.images import listing

if TYPE_CHECKING:
    from models.data.images.image_pool import Pool

GREY, RGB = 1, 3
DIGITS = 10
"""Classes of the digits that ship with scikit-learn."""


@dataclass
class Config:
    """Real images to segment or to classify: those that ship with scikit-learn, or the user's own folder."""

    name: str = "images"
    """The data set: models/data/images."""
    folder: str | None = None
    """Folder with images, and NAME_mask.png next to NAME.png or a subfolder for each class; null: handwritten
    digits."""


def load_pool(config: Config, model: Model, seed: int) -> Pool:
    """Read or draw all images once. Raises `harness.core.problem.CannotRun` where model or folder don't fit."""
    refuse(_task(model.task, model.name))
    refuse([*_shape(model), *_classes(config, model)])
    return _masked(config, model, seed) if model.task == "segmentation" else _classified(config, model)


def check(config: Config) -> list[Problem]:
    """A folder that does not exist or holds no image."""
    try:
        if config.folder is not None:
            listing.check(config.folder)
    except CannotRun as error:
        return list(error.problems)
    return []


def check_model(config: Config, task: str, model: Any) -> list[Problem]:
    """A model, described by its keys, that is not for images, or for fewer classes than there are."""
    try:
        if task == "classification" and hasattr(model, "classes"):
            return _too_few(config, model.classes)
    except CannotRun as error:  # what the folder lacks for classes
        return list(error.problems)
    return _task(task, model.name)


def _task(task: str, model: str) -> list[Problem]:
    if task in ("segmentation", "classification"):
        return []
    message = f"is for segmentation and classification, {model} does {task}"
    return [Problem("data", "images", message, ({"data": "text"}, {"data": "synthetic"}))]


def _shape(model: Model) -> list[Problem]:
    """Models take colour images; classifiers may also take n numbers, which are a square of grey ones."""
    shape = model.input_shape
    if len(shape) == 3 and shape[0] == RGB:
        return []
    if len(shape) > 1 or model.task != "classification":
        message = f"takes samples of {' x '.join(map(str, shape))}, images are {RGB} x height x width"
        return [Problem("model", model.name, message, ({"data": "synthetic"},))]
    side = _side(model)
    if side**2 == shape[0]:
        return []
    message = f"takes {shape[0]} numbers, an image of {side} x {side} has {side**2}"
    return [Problem("model", model.name, message, ({"data": "synthetic"},), f"model.widths=[{side**2},...]")]


def _classes(config: Config, model: Model) -> list[Problem]:
    """A classifier must have at least as many outputs as there are classes."""
    if model.task != "classification":
        return []
    wrong = _too_few(config, model.classes)
    if len(model.input_shape) > 1:
        return wrong
    return [replace(one, fixes=(), hint=f"model.widths=[...,{_there(config)}]") for one in wrong]


def _there(config: Config) -> int:
    return DIGITS if config.folder is None else len(listing.classes(config.folder))


def _too_few(config: Config, classes: int) -> list[Problem]:
    there = _there(config)
    who = "the digits have" if config.folder is None else f"data.folder {config.folder} has"
    message = f"is too few, {who} {there} classes"
    return [] if there <= classes else [Problem("model.classes", classes, message, ({"model.classes": there},))]


def _side(model: Model) -> int:
    """Return the side of the square that is nearest to the model's n numbers."""
    return round(math.sqrt(model.input_shape[0]))


def _masked(config: Config, model: Model, seed: int) -> Pool:
    from models.data.images import digits_on_photos, folder

    _, height, width = model.input_shape
    if config.folder is None:
        return digits_on_photos.draw(height, width, seed)
    return folder.read(config.folder, height, width)


def _classified(config: Config, model: Model) -> Pool:
    from models.data.images import class_folders, digits

    channels, height, width = model.input_shape if len(model.input_shape) == 3 else (GREY, _side(model), _side(model))
    if config.folder is None:
        return digits.read(height, width)
    return class_folders.read(config.folder, channels, height, width)
