"""The file that sbatch gets, whole; to accept a change, copy what the test shows into golden/."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from harness.core.problem import CannotRun
from slurm.array import Array
from slurm.resources import Shape
from slurm.script import Places, ranges, script
from slurm.settings import Settings
from slurm.submit import submit
from tests.problems import keys, refused

GOLDEN = Path(__file__).parent / "golden"
PLAIN = Places(Path("/data/runs/smoke"), Path("/data/runs/smoke/slurm"), Path("/home/me"), Path("/opt/regatta"),
               Path("/opt/regatta/.venv/bin/python"))  # fmt: skip
ODD = Places(Path("/it's \"a\" $(touch x); 100%"), Path("/it's \"a\" $(touch x); 100%/slurm"), Path("/a b"),
             Path("/opt/it's"), Path("/opt/a b/python"), "/my $(touch x) conf")  # fmt: skip
FULL = Settings(partition="gpu", gpus=4, time="1-0", mem="64G", parallel=8, account="us", qos="high",
                constraint="a100&nvlink")  # fmt: skip


@pytest.mark.parametrize(
    ("name", "settings", "shape", "places"),
    [
        ("plain", Settings(), Shape(1, 2), PLAIN),
        ("full", FULL, Shape(2, 4), PLAIN),
        ("odd", Settings(constraint='a"b'), Shape(1, 1), ODD),
    ],
)
def test_golden(name: str, settings: Settings, shape: Shape, places: Places) -> None:
    text = script(settings, shape, [0, 1, 2, 3, 9], places, grace_s=30)
    assert text == (GOLDEN / f"{name}.sbatch").read_text()
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize(
    ("indices", "text"), [([0], "0"), ([0, 1, 2, 5, 7, 8], "0-2,5,7-8"), ([3, 1, 2], "1-3"), ([], "")]
)
def test_ranges(indices: list[int], text: str) -> None:
    assert ranges(indices) == text


@pytest.mark.parametrize("name", ["a\nb", "a\\b"])
def test_a_folder_that_no_file_can_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(CannotRun, match="line break or a backslash"):
        Array(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("folder", "out"),
        ("logs", "slurm logs"),
        ("working", "working directory"),
        ("root", "project"),
        ("python", "python"),
        ("config_dir", "--config-dir"),
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r", "\x0b"])
def test_no_path_ends_a_line(name: str, key: str, end: str) -> None:
    path = f"/data/a{end}touch x #"
    with pytest.raises(CannotRun) as caught:
        replace(PLAIN, **{name: path if name == "config_dir" else Path(path)})
    assert keys(refused(caught)) == [key]


def test_a_working_directory_with_a_line_break_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / "a\nb"
    odd.mkdir()
    monkeypatch.chdir(odd)
    with pytest.raises(CannotRun) as caught:
        submit(Array(tmp_path / "run"), [], Settings(), [])
    assert keys(refused(caught)) == ["working directory"]
    assert not (tmp_path / "run").exists()
