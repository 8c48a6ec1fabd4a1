"""Which files of a folder are images, and which of them are masks of others. Free of torch and Pillow."""

from __future__ import annotations

from pathlib import Path

from harness.problem import CannotRun, Problem

FORMATS = {
    "PNG": (".png",),
    "JPEG": (".jpg", ".jpeg"),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "TIFF": (".tif", ".tiff"),
    "WEBP": (".webp",),
}
"""What is read, by its name in Pillow, with its suffixes; others, some of which Pillow hands to other programs, are
not."""
MASK = "_mask"


def find(folder: str) -> dict[Path, Path | None]:
    """The images of `folder` by name, each with its mask: NAME_mask.png beside NAME.png, of any format.

    A name that ends in _mask but belongs to no other image is an image. Raises `harness.problem.CannotRun` if
    there is no such folder, it cannot be read, or there is no image in it.
    """
    root = Path(folder).expanduser()
    if not folder or not root.exists():
        raise problem(folder, "does not exist")
    suffixes = [suffix for names in FORMATS.values() for suffix in names]
    try:
        files = sorted(file for file in root.iterdir() if file.suffix.lower() in suffixes and file.is_file())
    except OSError as error:
        raise problem(folder, f"cannot be listed: {error.strerror}") from error
    stems = {file.stem for file in files}
    masks = {file.stem: file for file in files if file.stem.endswith(MASK) and file.stem.removesuffix(MASK) in stems}
    images = [file for file in files if file.stem not in masks]
    if not images:
        raise problem(folder, f"holds 0 images ({' '.join(suffixes)})")
    return {file: masks.get(file.stem + MASK) for file in images}


def problem(folder: str, what: str) -> CannotRun:
    """What is wrong with `folder`, with what to type instead."""
    mend = "data.folder=DIR with images, or data.folder=null"
    return CannotRun([Problem(f"data.folder {folder or repr('')}", what, mend)])
