"""The file that sbatch gets, whole; to accept a change, copy what the test shows into golden/."""

import subprocess
from pathlib import Path

import pytest

from harness.core.problem import CannotRun
from slurm.array import Array
from slurm.resources import Shape
from slurm.script import Places, ranges, script
from slurm.settings import Settings

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
