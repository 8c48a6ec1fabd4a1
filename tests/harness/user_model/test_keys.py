"""Keys of a user's model on the command line, in a preset and in --help."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cli import help
from harness.cli.compose import compose
from harness.config import registry
from harness.core.problem import CannotRun
from harness.user_model import reference, sources
from tests.harness.user_model import nets

TYPED = '''\
from typing import Literal


def build(width: int, act: Literal["relu", "gelu"] = "relu", kernel: tuple[int, int] = (3, 3), rates: list[float] = [],
          norm: Literal[1, 2] = 1, sizes: list[Literal[8, 16]] = [8]):
    """A net."""
'''


def refused(*overrides: str) -> str:
    with pytest.raises(CannotRun) as raised:
        compose(reference.typed(overrides))
    return " ".join(str(raised.value).split())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), "model.width needs a value -> model.width=..."),
        (("model.width=x",), "model.width x is not a whole number"),
        (("model.width=3", "model.widht=4"), "model.widht is not a key of model=net.py:build -> model.width=4"),
        (("model.width=3", "model.act=gel"), "model.act gel is not one of relu, gelu -> model.act=gelu"),
        (("model.width=3", "model.norm=3"), "model.norm 3 is not one of 1, 2"),
        (
            ("model.width=3", "model.kernel=[3]"),
            "model.kernel [3] has 1 items, tuple[int, int] has 2 -> model.kernel=[3,3]",
        ),
        (("model.width=3", "model.sizes=[8,9]"), "model.sizes [8,9] holds 9, which is not one of 8 | 16"),
        (
            ("model.width=3", "model.task=classify"),
            "model.task classify is not one of classification, text, regression",
        ),
        (("model.width=3", "model.task=text"), "model.task text needs model.vocabulary and model.sequence"),
        (
            ("model.width=3", "model.task=text", "model.vocabulary=9", "model.sequence=0"),
            "model.sequence 0 must be at least 1",
        ),
        (
            ("model.width=3", *nets.KEYS, "model.sequence=4"),
            "model.sequence 4 is no key of model.task=classification, which has model.input and model.classes ->",
        ),
        (("model.width=3", "model.name=x"), "model.name x follows from model=..."),
        (("model.width=3", "data=text", *nets.KEYS), "data text is for text, net.py:build does classification"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(given: tuple[str, ...], message: str, tmp_path: Path) -> None:
    assert message in refused(f"model={nets.write(tmp_path, TYPED)}", *given)


def test_all_problems_at_once(tmp_path: Path) -> None:
    said = refused(f"model={tmp_path}/net.py:build", "model.width=3", "batch.sise=4")
    assert "does not exist" in said and "batch.sise is not a key" in said and "model.width" not in said


def test_help_has_the_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    text = help.text(reference.typed([f"model={nets.write(tmp_path)}", "model.width=3"]))
    lines = [line.rstrip() for line in text.splitlines()]
    assert any(line.endswith("A small classifier.") for line in lines[:2])
    assert "    model.width=8                   Numbers of its hidden layer. (a whole number)" in lines
    assert "    model.act=relu                  The activation: relu | gelu" in lines
    assert any(line.startswith("    model.scale=null ") for line in lines)
    assert any(line.startswith("    model.task=null ") for line in lines)
    assert "model.callable" not in text and "model.source" not in text
    required = help.text(reference.typed([f"model={nets.write(tmp_path, TYPED)}"]))
    assert "    model.width=... " in required and "    model.kernel=[3,3] " in required


def test_the_whole_page_names_it() -> None:
    assert "model=net.py:build" in help.text() and "model.vocabulary=null" in help.text([help.ALL])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for --config-dir, where nets.py is."""
    (tmp_path / "model").mkdir()
    monkeypatch.setenv(registry.FURTHER, str(tmp_path))
    nets.write(tmp_path, TYPED)
    return tmp_path


def preset(folder: Path, text: str) -> str:
    (folder / "model" / "mine.yaml").write_text(text)
    return "model=mine"


@pytest.mark.parametrize("callable", ["net.py:build", "../net.py:build", "{folder}/net.py:build"])
def test_a_preset(callable: str, folder: Path) -> None:
    """A relative path is one from the preset, or from the folder of presets."""
    typed = preset(folder, f"# Mine\ncallable: {callable.format(folder=folder)}\nwidth: 5\nkernel: [1, 2]\n")
    config = compose([typed, "model.act=gelu"]).model
    assert (config.callable, config.width, list(config.kernel), config.act) == (
        f"{folder}/net.py:build",
        5,
        [1, 2],
        "gelu",
    )
    assert help.text([typed]).startswith("model=mine ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("callable: net.py:build\nwidht: 3\n", "mine.yaml has widht, which is no key of"),
        ("callable: net.py:build\nwidth: wide\n", "mine.yaml has width: 'wide', which is not a whole number"),
        ("callable: net.py:build\nname: x\nwidth: 3\n", "mine.yaml has name next to callable"),
        ("callable: 3\n", "mine.yaml has callable: 3, which names none -> callable: net.py:build"),
        ("callable: nett.py:build\n", "nett.py:build does not exist"),
        ("callable: net.py:build\nwidth: ???\n", "model.width needs a value"),
        ("callable: net.py:build\nwidth: 3\ndefaults: [_self_]\n", "mine.yaml has defaults next to callable"),
    ],
)
def test_a_preset_that_is_wrong(text: str, message: str, folder: Path) -> None:
    assert message in refused(preset(folder, text))


def test_the_source_is_a_key(tmp_path: Path) -> None:
    """It changes with the file, and with modules of the user's that this imports, wherever it does; not with others."""
    blocks = tmp_path / "deep" / "blocks.py"
    nets.write(blocks.parent, "WIDTH = 3\n", blocks.name)
    (tmp_path / "other.py").write_text("a = 1\n")
    importing = f"{nets.SMALL}    from deep import blocks\n"
    typed = reference.typed([f"model={nets.write(tmp_path, importing)}"])
    place = reference.parse(compose(typed).model.callable)
    assert sources.files(place) == [blocks, tmp_path / "net.py"]
    seen = [compose(typed).model.source]
    for path, text in ((blocks, "WIDTH = 4\n"), (tmp_path / "net.py", f"{nets.SMALL}#\n"), (tmp_path / "other.py", "")):
        path.write_text(text)
        seen.append(compose(typed).model.source)
    assert len(set(seen)) == 3 and seen[2] == seen[3]
    assert {len(one) for one in seen} == {sources.DIGITS}
