"""The user's own folder with a folder for each class."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from harness.core.problem import CannotRun, Problem, advice
from models.classification_model import ClassificationModel
from models.data.images.class_folders import read
from models.data.images.config import Config, check
from models.data.images.images import build
from tests.problems import fixes

HALVES = np.array([[0, 255], [0, 255]], np.uint8).repeat(8, 0).repeat(8, 1)
"""16 x 16, dark on the left and bright on the right."""


def classifier(*shape: int, classes: int = 10) -> Any:
    return ClassificationModel("small", shape, classes)


def save(path: Path, colour: tuple[int, int, int] = (10, 100, 200)) -> None:
    path.parent.mkdir(exist_ok=True)
    Image.new("RGB", (12, 12), colour).save(path)


def problem(folder: str | Path) -> Problem:
    with pytest.raises(CannotRun) as caught:
        read(str(folder), 3, 8, 8)
    (found,) = caught.value.problems
    assert (found.key, found.value) == ("data.folder", str(folder))
    return found


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    """Three classes with 2, 1 and 1 images, and things that are none."""
    save(tmp_path / "cats" / "b.png", (50, 50, 50))
    save(tmp_path / "cats" / "a.bmp", (40, 40, 40))
    save(tmp_path / "apes" / "one.webp", (10, 10, 10))
    save(tmp_path / "dogs" / "d_mask.png", (90, 90, 90))
    save(tmp_path / ".trash" / "x.png")
    save(tmp_path / "loose.png")
    (tmp_path / "cats" / "notes.txt").write_text("no image")
    (tmp_path / "cats" / "deeper").mkdir()
    return tmp_path


def test_sorted_folders_are_the_classes(zoo: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pool = read(str(zoo), 3, 8, 8)
    assert pool.images.shape == (4, 3, 8, 8) and pool.images.is_contiguous()
    assert pool.images[:, 0, 0, 0].tolist() == [10, 40, 50, 90]
    assert pool.targets.tolist() == [0, 1, 1, 2]


def test_colours_and_greys(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(tmp_path / name / "x.png", (200, 100, 0))
    assert read(str(tmp_path), 3, 4, 6).images[0, :, 3, 5].tolist() == [200, 100, 0]
    grey = build(Config(folder=str(tmp_path)), classifier(25), seed=0).batch(0, 2).inputs
    assert grey.shape == (2, 25)
    assert ((grey + 1) * 127.5).round().unique().tolist() == [round(0.299 * 200 + 0.587 * 100)]


@pytest.mark.parametrize("shape", [(3, 8, 8), (64,)])
def test_photographs_are_mirrored(tmp_path: Path, shape: tuple[int, ...]) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.fromarray(HALVES).save(tmp_path / name / "x.png")
    batch = build(Config(folder=str(tmp_path)), classifier(*shape), seed=0).batch(0, 40)
    rows = {tuple(image.reshape(-1, 8, 8)[-1, 4, ::7].tolist()) for image in batch.inputs}
    assert rows == {(-1, 1), (1, -1)}
    assert sorted(batch.targets.tolist()) == [0] * 20 + [1] * 20


def test_broken_images_are_skipped_and_counted(zoo: Path) -> None:
    (zoo / "apes" / "cut.png").write_bytes((zoo / "loose.png").read_bytes()[:45])
    (zoo / "dogs" / "empty.jpg").touch()
    with pytest.warns(UserWarning, match=r"2 of 6 images .* cannot be read: apes/cut.png \(.*\), dogs/empty.jpg \("):
        pool = read(str(zoo), 3, 8, 8)
    assert pool.targets.tolist() == [0, 1, 1, 2] and len(pool.images) == 4


def test_a_class_of_broken_images_is_named(zoo: Path) -> None:
    (zoo / "apes" / "one.webp").write_bytes(b"nothing")
    found = problem(zoo)
    assert found.message.startswith("class apes has 0 images that can be used: 1 cannot be read: apes/one.webp (")
    assert fixes(found) == ["data.folder=null"] and "a folder of images for each class" in found.hint


def test_empty_classes_are_named(zoo: Path) -> None:
    for name in ("elks", "yaks"):
        (zoo / name).mkdir()
    assert problem(zoo).message == "2 of 5 classes hold 0 images: elks, yaks"
    for i in range(5):
        (zoo / f"bird{i}").mkdir()
    assert problem(zoo).message == "7 of 10 classes hold 0 images: bird0, bird1, bird2, bird3, bird4, ..."


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    assert problem(tmp_path / "none").message == problem("").message == "does not exist"
    save(tmp_path / "a.png")
    assert problem(tmp_path / "a.png").message == "cannot be listed: Not a directory"
    needed = "one for each of at least 2 classes is needed"
    assert problem(tmp_path).message == f"holds 0 folders, {needed}"
    save(tmp_path / "cats" / "a.png")
    assert problem(tmp_path).message == f"holds 1 folder (cats), {needed}"


def test_more_classes_than_the_model_knows(zoo: Path) -> None:
    (zoo / "cats" / "b.png").write_bytes(b"broken, but not read before the classes are counted")
    for shape, reported in (((3, 8, 8), "model.classes=3"), ((64,), "model.widths=[...,3]")):
        with pytest.raises(CannotRun) as caught, warnings.catch_warnings():
            warnings.simplefilter("error")
            build(Config(folder=str(zoo)), classifier(*shape, classes=2), seed=0)
        (found,) = caught.value.problems
        assert (found.key, found.value) == ("model.classes", 2) and f"data.folder {zoo} has 3 classes" in found.message
        assert advice(found) == reported


def test_check_reports_what_needs_no_model(zoo: Path) -> None:
    assert check(Config(folder=str(zoo))) == []
    (zoo / "elks").mkdir()
    assert check(Config(folder=str(zoo))) == []  # it has an image of its own: it may be there for segmentation
    (zoo / "loose.png").unlink()
    (found,) = check(Config(folder=str(zoo)))
    assert (found.key, found.value) == ("data.folder", str(zoo)) and "1 of 4 classes" in found.message
    (zoo / "elks").rmdir()
    assert check(Config(folder=str(zoo))) == []
