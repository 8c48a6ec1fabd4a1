"""The user's own folder: masks, no masks, broken files, no files."""

import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from harness.core.problem import CannotRun, Problem
from models.data.images.config import Config, check
from models.data.images.folder import read
from models.data.images.images import build
from models.unet.config import Config as UNetConfig
from models.unet.unet import build as unet
from tests.problems import row, rows

LEFT = np.array([[1, 0], [1, 0]])
TOP = np.array([[1, 1], [0, 0]])


def save(
    path: Path, quarters: np.ndarray, dark: int = 20, bright: int = 220, mode: str = "RGB", side: int = 32
) -> None:
    """A picture of 2 x 2 quarters, `bright` where `quarters` is 1."""
    values = np.where(quarters, bright, dark).astype(np.uint8).repeat(side // 2, 0).repeat(side // 2, 1)
    Image.fromarray(values).convert(mode).save(path)


def problem(folder: str | Path) -> Problem:
    with pytest.raises(CannotRun) as caught:
        read(str(folder), 8, 8)
    (found,) = caught.value.problems
    return found


def mask_corners(pool_masks: object, index: int) -> list[list[int]]:
    return pool_masks[index, 0, ::7, ::7].int().tolist()  # type: ignore[index]


def test_without_masks_the_target_is_what_is_brighter_than_the_median(tmp_path: Path) -> None:
    save(tmp_path / "a.png", np.array([[1, 0], [0, 0]]))
    save(tmp_path / "b.JPG", np.array([[0, 0], [1, 0]]), side=400)
    save(tmp_path / "c.gif", np.array([[0, 1], [0, 0]]), mode="P")
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "deeper.png").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pool = read(str(tmp_path), 8, 8)
    assert pool.images.shape == (3, 3, 8, 8) and pool.targets.shape == (3, 1, 8, 8)
    assert [mask_corners(pool.targets, i) for i in range(3)] == [[[1, 0], [0, 0]], [[0, 0], [1, 0]], [[0, 1], [0, 0]]]
    assert pool.images[0, :, 0, 0].tolist() == [220, 220, 220] and pool.images[0, :, 7, 7].tolist() == [20, 20, 20]


@pytest.mark.parametrize("dark, bright", [(0, 255), (0, 1), (10, 250)])
def test_a_mask_is_the_target(tmp_path: Path, dark: int, bright: int) -> None:
    save(tmp_path / "cat.jpg", TOP)
    save(tmp_path / "cat_mask.png", LEFT, dark, bright, mode="L", side=48)
    pool = read(str(tmp_path), 8, 8)
    assert len(pool.images) == 1
    assert mask_corners(pool.targets, 0) == LEFT.tolist()


def test_a_black_mask_is_all_background(tmp_path: Path) -> None:
    save(tmp_path / "cat.png", TOP)
    save(tmp_path / "cat_mask.png", LEFT, 0, 0, mode="L")
    assert not read(str(tmp_path), 8, 8).targets.any()


def test_a_name_that_ends_like_a_mask_is_an_image_if_it_belongs_to_none(tmp_path: Path) -> None:
    save(tmp_path / "gas_mask.png", TOP)
    assert mask_corners(read(str(tmp_path), 8, 8).targets, 0) == [[1, 1], [0, 0]]


def test_greys_of_16_bits_are_scaled(tmp_path: Path) -> None:
    values = np.linspace(1000, 3000, 64).astype(np.uint16).reshape(8, 8)
    Image.fromarray(values).save(tmp_path / "a.png")
    images = read(str(tmp_path), 8, 8).images
    assert images[0, 0, ::7, ::7].flatten()[[0, 3]].tolist() == [0, 255] and len(images.unique()) == 64


def test_broken_images_are_skipped_and_counted(tmp_path: Path) -> None:
    save(tmp_path / "good.png", TOP)
    save(tmp_path / "cut.png", TOP)
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:60])
    (tmp_path / "empty.jpg").touch()
    with pytest.warns(UserWarning, match=r"2 of 3 images are left out: 2 cannot be read: cut.png \(.*\), empty.jpg \("):
        assert len(read(str(tmp_path), 8, 8).images) == 1


def test_a_broken_mask_leaves_its_image_out(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(tmp_path / f"{name}.png", TOP)
        save(tmp_path / f"{name}_mask.png", LEFT, mode="L")
    (tmp_path / "b_mask.png").write_bytes(b"nothing")
    with pytest.warns(UserWarning, match="1 of 2 images are left out: 1 cannot be read: b.png"):
        assert len(read(str(tmp_path), 8, 8).images) == 1


def test_images_without_a_mask_are_left_out_where_others_have_one(tmp_path: Path) -> None:
    for name in ("a", "a_mask", "b", "c"):
        save(tmp_path / f"{name}.png", TOP)
    with pytest.warns(UserWarning, match="2 of 3 images are left out: 2 without a mask: b.png, c.png"):
        assert len(read(str(tmp_path), 8, 8).images) == 1


def test_a_file_is_read_as_an_image_only(tmp_path: Path) -> None:
    """Pillow hands PostScript to another program: a file of that kind under an image's name is broken."""
    save(tmp_path / "a.png", TOP)
    Image.new("RGB", (8, 8)).save(tmp_path / "b.png", format="EPS")
    with pytest.warns(UserWarning, match=r"1 cannot be read: b.png \(UnidentifiedImageError\)"):
        read(str(tmp_path), 8, 8)


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    missing = problem(tmp_path / "none")
    assert row(missing) == ("data.folder", str(tmp_path / "none"), ["data.folder=null"])
    assert "data.folder=DIR" in missing.hint and missing.message == "does not exist"
    assert problem("").message == problem("x" * 300).message == "does not exist"
    assert problem(tmp_path).message.startswith("holds 0 images (.png .jpg")
    (tmp_path / "a.png").write_bytes(b"nothing")
    assert problem(tmp_path / "a.png").message == "cannot be listed: Not a directory"
    unreadable = "holds 1 images, 0 of them can be used: 1 cannot be read: a.png (UnidentifiedImageError)"
    assert problem(tmp_path).message == unreadable


def test_the_folder_key(tmp_path: Path) -> None:
    save(tmp_path / "a.png", TOP)
    data = build(Config(folder=str(tmp_path)), unet(UNetConfig(size=64)), seed=0)
    batch = data.batch(0, 2)
    assert batch.inputs.shape == (2, 3, 64, 64) and batch.targets.mean() == 0.5


def test_check_names_a_folder_without_images_before_anything_is_read(tmp_path: Path) -> None:
    assert check(Config()) == []
    assert (problem("").key, problem("").value) == ("data.folder", "")
    assert rows(check(Config(folder="/none"))) == [("data.folder", "/none", ["data.folder=null"])]
    assert rows(check(Config(folder=str(tmp_path)))) == [("data.folder", str(tmp_path), ["data.folder=null"])]
    (tmp_path / "a.png").write_bytes(b"nothing")
    assert check(Config(folder=str(tmp_path))) == []
