"""A model is known again by its code: wherever its file is, and whatever its comments say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.user_model import reference, sources
from tests.harness.user_model import nets

HELPED = "from part import hidden\n\n\ndef build():\n    return hidden(3)\n"


def code(file: Path, name: str = "build") -> str:
    return sources.code(reference.parse(f"{file}:{name}"))


@pytest.mark.parametrize(
    ("edit", "same"),
    [
        (lambda text: f"# A comment.\n\n\n{text}", True),
        (lambda text: text.replace('"""A small classifier.', '"""Another text.'), True),
        (lambda text: text.replace("nn.Linear(4, width), ", "nn.Linear(\n        4, width  # in\n    ), "), True),
        (lambda text: text.replace("nn.Linear(width, 3)", "nn.Linear(width, 4)"), False),
        (lambda text: text.replace("width: int = 8", "width: int = 9"), False),
        (lambda text: text.replace("nn.GELU()", "nn.Tanh()"), False),
        (lambda text: f"{text}\n(", False),
    ],
)
def test_an_edit(edit: Callable[[str], str], same: bool, tmp_path: Path) -> None:
    nets.write(tmp_path / "a")
    nets.write(tmp_path / "b", edit(nets.SMALL), "other.py")
    assert (tmp_path / "a" / "net.py").read_text() != (tmp_path / "b" / "other.py").read_text()
    assert (code(tmp_path / "a" / "net.py") == code(tmp_path / "b" / "other.py")) is same


def test_what_a_file_imports_counts_with_its_name(tmp_path: Path) -> None:
    for folder, part in (("a", "hidden = int\n"), ("b", "hidden = int  # same\n"), ("c", "hidden = str\n")):
        nets.write(tmp_path / folder, HELPED, f"{folder}.py")
        nets.write(tmp_path / folder, part, "part.py")
    one, same, other = (code(tmp_path / folder / f"{folder}.py") for folder in "abc")
    assert one == same != other
