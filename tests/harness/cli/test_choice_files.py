"""Files of choices in a user's folder: what is refused, and that the advice works."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.cli import choice_files
from harness.cli import compose as compose_module
from harness.cli.compose import compose, search
from harness.config import registry
from harness.core.problem import CannotRun, Problem
from tests.problems import refused


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, of this test alone."""
    monkeypatch.setenv(registry.FURTHER, str(tmp_path))
    search(str(tmp_path))
    compose_module._composed.cache_clear()
    return tmp_path


def write(folder: Path, choice: str, text: str) -> None:
    path = folder / f"{choice}.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    compose_module._composed.cache_clear()
    compose_module._CHOICES.clear()


def problems(*overrides: str) -> list[Problem]:
    with pytest.raises(CannotRun) as caught:
        compose([*overrides])
    return refused(caught)


IN_A_RUN = "# @package _global_\ndefaults: [_cluster@cluster, _self_]\ncluster:\n  name: x\n"
GIVEN = "# @package _global_\ndefaults: [_given@planner, _self_]\nplanner:\n  name: given\n  balance: ???\n"
MISSING = "defaults: [_cluster, _self_]\nname: mine\ndevices: ???\nmemory_gb: ???\n"


@pytest.mark.parametrize(
    ("choice", "text", "keys"),
    [
        ("cluster/q", MISSING, ["cluster.devices", "cluster.memory_gb"]),
        ("engine/q", "defaults: [_gpipe, _self_]\nname: gpipe\nportals: ???\n", ["engine.portals"]),
        ("model/q", "defaults: [_unet, _self_]\nname: unet\nchannels: ???\n", ["model.channels"]),
        ("data/q", "defaults: [_text, _self_]\nname: text\nfile: ???\n", ["data.file"]),
        ("planner/q", GIVEN, ["planner.balance"]),
        ("precision/q", "defaults: [_precision, _self_]\ndtype: ???\n", ["precision.dtype"]),
    ],
)  # fmt: skip
def test_missing_values_are_named(choice: str, text: str, keys: list[str], folder: Path) -> None:
    write(folder, choice, text)
    found = problems(choice.replace("/", "="))
    assert sorted(problem.key for problem in found) == sorted(keys)
    assert {problem.hint for problem in found} == {f"{key}=..." for key in keys}


def test_missing_values_may_be_given(folder: Path) -> None:
    write(folder, "cluster/q", MISSING)
    assert compose(["cluster=q", "cluster.memory_gb=2", "cluster.devices=3"]).cluster.devices == 3
    write(folder, "cluster/r", "defaults: [q, _self_]\nmemory_gb: 2\n")
    assert [problem.key for problem in problems("cluster=r")] == ["cluster.devices"]
    write(folder, "cluster/s", "defaults: [r, _self_]\ndevices: 5\n")
    assert compose(["cluster=s"]).cluster.devices == 5


@pytest.mark.parametrize(
    ("group", "schema", "hint"), [("engine", "gpipe", "name: gpipe"), ("cluster", "cluster", "name: q")]
)
def test_a_missing_name(group: str, schema: str, hint: str, folder: Path) -> None:
    write(folder, f"{group}/q", f"defaults: [_{schema}, _self_]\nname: ???\n")
    [problem] = problems(f"{group}=q")
    assert (problem.key, problem.hint) == (group, hint)


def test_a_wrong_type_is_said_without_the_names_of_types(folder: Path) -> None:
    write(folder, "cluster/q", "defaults: [_cluster, _self_]\nname: mine\ndevices: many\n")
    [problem] = problems("cluster=q")
    assert problem.key == str(folder / "cluster/q.yaml")
    assert problem.message == "cluster.devices many is not a whole number"


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("# @package _global_\ndefaults: [_cluster, _self_]\nname: x\n", "defaults: [_cluster, _self_]\nname: x\n"),
        ("# @package foo\nname: x\n", "defaults: [_cluster, _self_]\nname: x\n"),
        ("# @package foo\ncluster:\n  name: x\n", IN_A_RUN),
        ("# @package _global_\ncluster:\n  name: x\n", IN_A_RUN),
    ],
)  # fmt: skip
def test_the_advice_on_packages_works(text: str, right: str, folder: Path) -> None:
    write(folder, "cluster/q", text)
    [problem] = problems("cluster=q")
    lines = right.splitlines()
    assert next(line for line in lines if "defaults" in line) in problem.hint
    if lines[0].startswith("#"):
        assert lines[0] in problem.hint or text.startswith(lines[0])
    else:
        assert "no such line" in problem.hint
    write(folder, "cluster/q", right)
    assert compose(["cluster=q"]).cluster.name == "x"


@pytest.mark.parametrize(
    ("text", "key", "meant"),
    [
        ("defaults: [_cluster, _self_]\nname: mine\nmemry_gb: 24\n", "cluster.memry_gb", "cluster.memory_gb"),
        ("defaults: [_cluster, _self_]\nname: mine\npeak_tflops: {flaot32: 1}\n", "flaot32", "float32"),
        ("defaults: [_cluster, _self_]\nname: mine\nqqqq: 24\n", "cluster.qqqq", ""),
    ],
)
def test_a_misspelt_key_of_a_file_has_the_one_that_is_meant(text: str, key: str, meant: str, folder: Path) -> None:
    write(folder, "cluster/q", text)
    (problem,) = problems("cluster=q")
    assert (
        problem.key == str(folder / "cluster/q.yaml") and key in problem.message and "is not a key" in problem.message
    )
    assert problem.hint.endswith(meant) and bool(problem.hint) == bool(meant)


def test_a_file_that_has_not_changed_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """The points of a sweep have the same choices; who reads one may change what it gets."""
    path, read = tmp_path / "a.yaml", []
    path.write_text("a: {b: 1}")
    real = choice_files._read
    monkeypatch.setattr(choice_files, "_read", lambda path: read.append(path) or real(path))
    for _ in range(2):
        choice_files.read(path)
    assert len(read) == 2, "it may be written again without another time of change"
    os.utime(path, (0, 1000))
    for _ in range(3):
        choice_files.read(path)["a"]["b"] = 2
    assert len(read) == 3 and choice_files.read(path) == {"a": {"b": 1}}
    path.write_text("a: 3")
    os.utime(path, (0, 1001))
    assert choice_files.read(path) == {"a": 3}
    path.unlink()
    with pytest.raises(CannotRun):
        choice_files.read(path)
