"""A folder has one run, or several below it, not both: a run that begins again removes the files of its folder."""

from pathlib import Path

import pytest

from harness.core.problem import CannotRun
from harness.core.run_files import LOCK, POINTS, RECORD, TABLE
from harness.run.run_folder import make_folder

ID = "20250131-235959-1a2b3c"


def with_run(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in (RECORD, LOCK):
        (folder / name).touch()
    return folder


def refused(folder: Path) -> str:
    with pytest.raises(CannotRun) as raised:
        make_folder(str(folder), ID)
    return " ".join(str(raised.value).split())


@pytest.mark.parametrize("below", ["inner", "inner/deeper"])
def test_inside_the_folder_of_a_run(tmp_path: Path, below: str) -> None:
    run = with_run(tmp_path / "run")
    message = refused(run / below)
    assert f"is in the folder of a run, {run}" in message
    assert f"-> out={run}-2" in message
    assert not (run / "inner").exists()


@pytest.mark.parametrize("name", [TABLE, POINTS])
def test_the_folder_of_a_sweep(tmp_path: Path, name: str) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / name).touch()
    message = refused(tmp_path / "sweep")
    assert "is the folder of a sweep" in message
    assert f"-> out={tmp_path}/sweep-2" in message


@pytest.mark.parametrize("below", ["0001", f"2025-01-31/{ID}", f"runs/2025-01-31/{ID}"])
def test_a_folder_above_runs(tmp_path: Path, below: str) -> None:
    with_run(tmp_path / "runs" / below)
    assert "is the folder of other runs" in refused(tmp_path / "runs")
    assert make_folder(str(tmp_path / "runs-2"), ID) == tmp_path / "runs-2"


def test_the_folder_of_a_run_itself(tmp_path: Path) -> None:
    run = with_run(tmp_path / "run")
    with_run(run / ".new")  # a start that was killed before it was accepted
    assert make_folder(str(run), ID) == run
