"""`check_model`: what is seen of data and model before either is built: in the parent, without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from PIL import Image

from harness.config import registry
from tests.problems import Row, rows


def problems(data: dict[str, Any], model: dict[str, Any]) -> list[Row]:
    return rows(registry.unsuited(OmegaConf.create(data), OmegaConf.create(model)))


@pytest.mark.parametrize(
    ("data", "model", "found"),
    [
        ("text", {"name": "unet"}, ("data", "text", ["data=synthetic", "model=gpt"])),
        ("text", {"name": "mlp"}, ("data", "text", ["data=synthetic", "model=gpt"])),
        ("text", {"name": "gpt", "vocabulary": 50}, ("model.vocabulary", 50, ["model.vocabulary=256"])),
        ("images", {"name": "gpt"}, ("data", "images", ["data=text", "data=synthetic"])),
        ("images", {"name": "vgg", "classes": 9}, ("model.classes", 9, ["model.classes=10"])),
    ],
)
def test_what_does_not_suit(data: str, model: dict[str, Any], found: Row) -> None:
    assert problems({"name": data}, model) == [found]


@pytest.mark.parametrize(
    ("data", "model"), [("text", "gpt"), ("images", "unet"), ("images", "resnet"), ("synthetic", "gpt")]
)
def test_what_suits(data: str, model: str) -> None:
    assert problems({"name": data}, {"name": model}) == []


def test_words_are_counted_only_when_they_are_read() -> None:
    assert problems({"name": "text", "tokens": "words"}, {"name": "gpt", "vocabulary": 50}) == []


def test_a_folder_of_classes(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / name / "one.png")
    data = {"name": "images", "folder": str(tmp_path)}
    assert problems(data, {"name": "resnet", "classes": 3}) == []
    assert problems(data, {"name": "resnet", "classes": 2}) == [("model.classes", 2, ["model.classes=3"])]
    (tmp_path / "c" / "one.png").unlink()
    assert problems(data, {"name": "resnet"}) == [("data.folder", str(tmp_path), ["data.folder=null"])]
