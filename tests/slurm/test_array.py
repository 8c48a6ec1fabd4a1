"""A sweep's folder as Slurm's arrays know it, without Slurm."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness.core import files, run_files
from harness.core.record import RunRecord
from harness.sweep.points import Point, expand
from slurm import array, commands, status
from slurm.array import Array, Job
from slurm.resources import Shape
from slurm.settings import Settings

POINTS = expand(["seed=0,1,2"])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What Slurm was asked; it says that the array is job 7."""
    programs: list[str] = []

    def ask(command: Sequence[str]) -> str:
        programs.append(command[0])
        return "7;cluster\n"

    monkeypatch.setattr(commands, "ask", ask)
    return programs


def submitted(folder: Path) -> Array:
    opened = Array(folder)
    with opened.changing():
        opened.submit(opened.add(POINTS), Settings(nodes=2), Shape(2, 1), 30)
    return opened


def test_the_status_of_a_folder_is_kept_as_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One point waits, one has a record that cannot be read, one is done."""
    monkeypatch.setattr(commands, "ask", lambda command: "7|0|PENDING|Priority\n" if command[0] == "squeue" else "7\n")
    opened = submitted(tmp_path)
    opened.run(POINTS[1]).mkdir()
    (opened.run(POINTS[1]) / "record.json").write_text('{"id": "x", "sta')
    RunRecord("x", "ok").save(opened.run(POINTS[2]) / "record.json")
    assert status.main([str(tmp_path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "missing (its record.json cannot be read)" in printed
    assert "3 points: 1 ok, 1 missing, 1 pending" in printed
    rows = list(csv.DictReader((tmp_path / "points.csv").read_text().splitlines()))
    assert [(row["seed"], row["status"]) for row in rows] == [("0", "pending"), ("1", "missing"), ("2", "ok")]


@pytest.mark.parametrize("name", [run_files.POINTS, f"{array.OWN}/{array.JOBS}"])
@pytest.mark.parametrize("content", ["{", "3\n", "[1]\n", "{}\n", '{"id": 3, "job": 3}\n', "[" * 100000, None])
def test_a_file_that_is_damaged_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: str | None,
) -> None:
    monkeypatch.setattr(commands, "ask", lambda command: "7|0|PENDING|Priority\n" if command[0] == "squeue" else "7\n")
    submitted(tmp_path)
    path = tmp_path / name
    path.unlink()
    os.mkfifo(path) if content is None else path.write_text(content)
    assert status.main([str(tmp_path)]) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert str(path) in printed and "is damaged" in printed


def test_what_was_submitted_is_known(tmp_path: Path, asked: list[str]) -> None:
    opened = submitted(tmp_path)
    with opened.changing():
        assert opened.add([Point.of(["seed=9"]), *POINTS[1:]]) == [3, 1, 2], "an index stays what it is"
        opened.submit([3], Settings(), Shape(1, 1), 30)
    assert opened.jobs() == [Job("7", (0, 1, 2)), Job("7", (3,))]
    assert opened.settings() == Settings(), "of the last submission"
    assert asked == ["sbatch", "sbatch"]


@pytest.mark.parametrize(
    ("name", "expected"), [(array.JOBS, ["sbatch", "scancel"]), (array.SCRIPT, []), (run_files.POINTS, [])]
)
def test_a_full_disk_leaves_no_job_that_nobody_knows(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch, name: str, expected: list[str]
) -> None:
    submitted(tmp_path)
    asked.clear()
    write = files.write_bytes

    def write_bytes(path: Path, data: bytes) -> None:
        if path.name == name:
            raise OSError(28, "No space left on device")
        write(path, data)

    monkeypatch.setattr(files, "write_bytes", write_bytes)
    opened = Array(tmp_path)
    with pytest.raises(OSError, match="No space"), opened.changing():
        opened.submit(opened.add([*POINTS, Point.of(["seed=3"])]), Settings(), Shape(1, 1), 30)
    assert asked == expected
    assert [job.indices for job in opened.jobs()] == [(0, 1, 2)]
