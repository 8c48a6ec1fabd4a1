"""What `model=` may name, from any working directory, with any characters in its path."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from harness.cli.compose import compose
from harness.config import registry
from harness.core.problem import CannotRun
from harness.sweep.points import expand
from harness.user_model import reference
from tests.harness.user_model import nets
from tests.tiers import examples

NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/"), min_size=1, max_size=12).filter(
    lambda name: name not in (".", "..") and len(name.encode()) < 200
)


def model(overrides: list[str]) -> str:
    """The callable of a configuration, as it is kept."""
    return str(compose(overrides).model.callable)


@pytest.mark.parametrize("typed", ["net.py:build", "./net.py:build", "../here/net.py:build", "{folder}/net.py:build"])
def test_a_file_is_kept_with_its_whole_path(typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nets.write(tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    (kept,) = reference.typed([f"model={typed.format(folder=tmp_path / 'here')}"])
    monkeypatch.chdir(tmp_path)
    assert model([kept, *nets.KEYS]) == f"{tmp_path}/here/net.py:build"


def test_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nets.write(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert reference.parse("~/net.py:build").place == f"{tmp_path}/net.py"


def test_a_module_below_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without __init__.py; one that Python finds anyway needs no folder."""
    nets.write(tmp_path / "nets")
    monkeypatch.chdir(tmp_path)
    found = reference.parse("nets.net:build")
    assert found.text == f"{tmp_path}:nets.net:build" and reference.parse(found.text) == found
    assert reference.find(found) == tmp_path / "nets" / "net.py"
    assert (found.title, found.shown) == ("nets.net:build", "nets.net:build")
    assert reference.parse("json.decoder:JSONDecoder").folder == ""
    assert reference.find(reference.parse("json.decoder:JSONDecoder")).name == "decoder.py"


@pytest.mark.parametrize("name", ["a\nb", "a\tb", "\x7f", b"\xff".decode(errors="surrogateescape")])
def test_characters_that_no_line_can_hold(name: str, tmp_path: Path) -> None:
    with pytest.raises(CannotRun, match=r"has\s+a\s+control\s+character"):
        compose(reference.typed([f"model={nets.write(tmp_path / name)}"]))


@pytest.mark.usefixtures("computation")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(150))
@given(name=NAMES)
@example(name="a b, [c]=d'e\"f")
@example(name="'quoted'")
@example(name="a:b")
@example(name="$x %20 \\ \\' {1,2} (a)")
@example(name="ünïcödé…")
@example(name="a.py:build,b")
@example(name="~")
@example(name="[x]")
@example(name="choice(a)")
@example(name="1e5")
@example(name="???")
@example(name="a.b.c")
@example(name=" ")
@example(name="\u00a0\u2028\u3000")
@example(name="${x}")
@example(name="#")
@example(name="trailing\\")
def test_any_characters_in_the_path(name: str, tmp_path: Path) -> None:
    """Alone, and among others of a sweep."""
    first = nets.write(tmp_path / name / "x")
    if "${" in name:
        with pytest.raises(CannotRun, match=r"has\s+\$\{\s+in\s+its\s+path"):
            model(reference.typed([f"model={first}", *nets.KEYS]))
        return
    assert model([*reference.typed([f"model={first}"]), *nets.KEYS]) == first
    here = os.getcwd()
    os.chdir(tmp_path / name)
    try:
        assert model([*reference.typed(["model=x/net.py:build"]), *nets.KEYS]) == first
        points = expand(reference.typed([f"model=x/net.py:build,unet,{first}", *nets.KEYS]))
    finally:
        os.chdir(here)
    chosen = [next(text for text in point.overrides if text.startswith("model=")) for point in points]
    assert [model([chosen[0], *nets.KEYS]), chosen[1:]] == [first, ["model=unet"]]  # twice the same is one point


@given(st.text(max_size=30))
@settings(max_examples=examples(300))
def test_other_overrides_stay(text: str) -> None:
    others = [text, f"out={text}", "model=unet", "model=unet,gpt", "model.width=3", "+model=a.py:b"]
    assert reference.typed(others) == (
        others if not text.startswith("model=") else reference.typed([text]) + others[1:]
    )


@pytest.mark.parametrize(
    "typed",
    ["{a}:build,{b}:build", "choice({a}:build,{b}:build)", "'{a}:build','{b}:build'"],
)
def test_several_models_of_a_sweep(typed: str, tmp_path: Path) -> None:
    for name in ("a.py", "b.py"):
        nets.write(tmp_path, name=name)
    value = typed.format(a=tmp_path / "a.py", b=tmp_path / "b.py")
    points = expand(reference.typed([f"model={value}", *nets.KEYS]))
    assert [model(list(point.overrides)) for point in points] == [
        f"{tmp_path}/{name}:build" for name in ("a.py", "b.py")
    ]


def test_commas_that_are_ambiguous_follow_what_exists(tmp_path: Path) -> None:
    whole = nets.write(tmp_path, name="a.py:build,b.py")
    assert len(expand(reference.typed([f"model={whole}"]))) == 1
    (tmp_path / "a.py:build,b.py").unlink()
    assert len(expand(reference.typed([f"model={tmp_path}/a.py:build,{tmp_path}/b.py:build"]))) == 2


def test_several_models_are_no_single_run(tmp_path: Path) -> None:
    one = nets.write(tmp_path)
    with pytest.raises(CannotRun, match="gives several values, one run takes one"):
        compose(reference.typed([f"model={one},{one}"]))


@pytest.mark.parametrize(
    ("typed", "message", "fix"),
    [
        ("nett.py:build", "does not exist", "model=net.py:build"),
        (".:build", "is neither a file", ""),
        ("sub/:build", "is not a Python file", ""),
        ("net.py", "names no function or class", "model=net.py:build"),
        ("net.py:", "names no function or class", "model=net.py:build"),
        ("net.py:bu ild", "names no function or class", "model=FILE.py:NAME"),
        ("other.nets:build", "is not found: there is no module other.nets", ""),
        ("net.txt:build", "is not a Python file", ""),
        ("./net.txt:build", "is not a Python file", ""),
    ],
)
def test_what_names_nothing(
    typed: str, message: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nets.write(tmp_path)
    nets.write(tmp_path, name="net.txt")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CannotRun) as raised:
        compose(reference.typed([f"model={typed}", "model.width=3", "batch.sise=3"]))
    said = str(raised.value)
    assert message in said and fix in said
    assert sorted(problem.key for problem in raised.value.problems) == ["batch.sise", "model"]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("net.py", "model={place}:build"),
        ("my net.py", """'model='"'"'{place}:build'"'"''"""),
        ("net,1.py", """'model='"'"'{place}:build'"'"''"""),
    ],
)
def test_a_command_has_no_quotes_that_are_not_needed(name: str, shown: str, tmp_path: Path) -> None:
    """And means the same when it is typed."""
    place = tmp_path / name
    place.touch()
    overrides = ["engine=ddp", *reference.typed([f"model={place}:build"]), "model.width=8"]
    command = reference.command(overrides)
    assert command == f"python run.py engine=ddp {shown.format(place=place)} model.width=8"
    assert reference.typed(shlex.split(command)[2:]) == overrides


def test_a_command_has_the_folder_of_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of --config-dir: without it cluster=mine would be none."""
    monkeypatch.setenv(registry.FURTHER, f"{tmp_path}/my own")
    words = shlex.split(reference.command(["cluster=mine"]))
    assert words == ["python", "run.py", "--config-dir", f"{tmp_path}/my own", "cluster=mine"]
