"""What is seen of data and model before either is built: in the parent, without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from PIL import Image

from harness import registry


def told(data: dict[str, Any], model: dict[str, Any]) -> list[str]:
    found = registry.unsuited(OmegaConf.create(data), OmegaConf.create(model))
    return [f"{problem.key}   {problem.what}   -> {problem.mend}" for problem in found]


@pytest.mark.parametrize(
    ("data", "model", "line"),
    [
        ("text", {"name": "unet"}, "data text   is for text, unet does segmentation   -> data=synthetic, or model=gpt"),
        ("text", {"name": "mlp"}, "data text   is for text, mlp does classification   -> data=synthetic, or model=gpt"),
        ("text", {"name": "gpt", "vocabulary": 50}, "model.vocabulary 50   bytes need 256   -> model.vocabulary=256"),
        ("images", {"name": "gpt"}, "data images   is for segmentation and classification, gpt does text   "
         "-> data=text, or data=synthetic"),
        ("images", {"name": "vgg", "classes": 9}, "model.classes 9   the digits have 10 classes   -> model.classes=10"),
    ],
)  # fmt: skip
def test_what_does_not_suit(data: str, model: dict[str, Any], line: str) -> None:
    assert told({"name": data}, model) == [line]


@pytest.mark.parametrize(
    ("data", "model"), [("text", "gpt"), ("images", "unet"), ("images", "resnet"), ("synthetic", "gpt")]
)
def test_what_suits(data: str, model: str) -> None:
    assert told({"name": data}, {"name": model}) == []


def test_words_are_counted_only_when_they_are_read() -> None:
    assert told({"name": "text", "tokens": "words"}, {"name": "gpt", "vocabulary": 50}) == []


def test_a_folder_of_classes(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / name / "one.png")
    data = {"name": "images", "folder": str(tmp_path)}
    assert told(data, {"name": "resnet", "classes": 3}) == []
    (line,) = told(data, {"name": "resnet", "classes": 2})
    assert line == f"model.classes 2   data.folder {tmp_path} has 3 classes   -> model.classes=3"
    (tmp_path / "c" / "one.png").unlink()
    (line,) = told(data, {"name": "resnet"})
    assert line.startswith(f"data.folder {tmp_path}   1 of 3 classes hold 0 images: c")
