"""List the files of a folder: images, masks of images, and folders that are classes.

Free of torch and Pillow.
"""

from __future__ import annotations

import os
from pathlib import Path

from harness.core.problem import CannotRun, Fix, Problem

FORMATS = {
    "PNG": (".png",),
    "JPEG": (".jpg", ".jpeg"),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "TIFF": (".tif", ".tiff"),
    "WEBP": (".webp",),
}
"""Pillow's formats that are read, with their suffixes; no others, because Pillow hands some to other programs."""
SUFFIXES = tuple(suffix for names in FORMATS.values() for suffix in names)
MASK = "_mask"
LEAST_CLASSES = 2
NAMED = 5
"""Number of classes that a problem names."""


def find(folder: str) -> dict[Path, Path | None]:
    """The images of `folder` by name, each with its mask: NAME_mask.png next to NAME.png, of any format.

    A name that ends in _mask but belongs to no other image is an image. Raises `harness.core.problem.CannotRun` if
    there is no such folder, it cannot be read, or there is no image in it.
    """
    files = _images(folder, _root(folder))
    stems = {file.stem for file in files}
    masks = {file.stem: file for file in files if file.stem.endswith(MASK) and file.stem.removesuffix(MASK) in stems}
    images = [file for file in files if file.stem not in masks]
    if not images:
        raise problem(folder, f"holds 0 images ({' '.join(SUFFIXES)})")
    return {file: masks.get(file.stem + MASK) for file in images}


def classes(folder: str) -> dict[str, list[Path]]:
    """The images of each folder in `folder`, by its name; hidden folders are no classes.

    Raises `harness.core.problem.CannotRun` if there is no such folder, it cannot be read, it has less than two
    classes, or one of them has no image.
    """
    found = {path.name: _images(folder, path) for path in _folders(folder)}
    if len(found) < LEAST_CLASSES:
        there = f"holds {len(found)} folders" if len(found) != 1 else f"holds 1 folder ({next(iter(found))})"
        raise classes_problem(folder, f"{there}, one for each of at least {LEAST_CLASSES} classes is needed")
    empty = [name for name, files in found.items() if not files]
    if empty:
        names = ", ".join(empty[:NAMED]) + ", ..." * (len(empty) > NAMED)
        raise classes_problem(folder, f"{len(empty)} of {len(found)} classes hold 0 images: {names}")
    return found


def check(folder: str) -> None:
    """Raise `harness.core.problem.CannotRun` where neither `find` nor `classes` has anything to find."""
    if _folders(folder) and not _images(folder, _root(folder)):
        classes(folder)
    else:
        find(folder)


def problem(folder: str, message: str, needed: str = "images") -> CannotRun:
    """Return an error for `folder`."""
    fix: Fix = {"data.folder": None}
    return CannotRun([Problem("data.folder", folder, message, (fix,), f"data.folder=DIR with {needed}")])


def classes_problem(folder: str, message: str) -> CannotRun:
    """Return an error for the classes in `folder`."""
    return problem(folder, message, "a folder of images for each class")


def _root(folder: str) -> Path:
    root = Path(folder).expanduser()
    if not folder or not os.path.exists(root):
        raise problem(folder, "does not exist")
    return root


def _folders(folder: str) -> list[Path]:
    return [path for path in _listed(folder, _root(folder)) if path.is_dir() and not path.name.startswith(".")]


def _images(folder: str, path: Path) -> list[Path]:
    return [file for file in _listed(folder, path) if file.suffix.lower() in SUFFIXES and file.is_file()]


def _listed(folder: str, path: Path) -> list[Path]:
    """Return the content of `path`, which is data.folder or a folder in it, by name."""
    try:
        return sorted(path.iterdir())
    except OSError as error:
        where = "" if path == Path(folder).expanduser() else f": {path.name}"
        raise problem(folder, f"cannot be listed: {error.strerror}{where}") from error
