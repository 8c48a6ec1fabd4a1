"""A folder has one run, or several below it, not both: a run that begins again removes the files of its folder."""

from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from harness.core.problem import CannotRun
from harness.core.record import RunRecord
from harness.core.run_files import CHECKPOINTS, CONFIG, HANG, LOCK, LOG, POINTS, RECORD, STOP, TABLE
from harness.run import folder_lock
from harness.run.checkpoint_files import RunState, write
from harness.run.run_folder import NEW, RunFolder, make_folder
from harness.sweep import local

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


def living(folder: Path) -> AbstractContextManager[object]:
    """A run that is just starting: it has its lock, and no record."""
    folder.mkdir(parents=True)
    return folder_lock.held(folder)


@pytest.mark.parametrize("name", sorted({CHECKPOINTS, HANG, LOG, STOP, CONFIG, NEW, "0001", "a/b"}))
def test_above_a_run_that_is_starting(tmp_path: Path, name: str) -> None:
    """Whatever the run's folder is called, and if the folder above was one of a run."""
    with living(tmp_path / "out" / name):
        assert "is the folder of other runs" in refused(tmp_path / "out")
        (tmp_path / "out" / RECORD).touch()
        assert "is the folder of other runs" in refused(tmp_path / "out")
    assert (tmp_path / "out" / name / LOCK).exists()


def test_inside_a_run_that_is_starting(tmp_path: Path) -> None:
    with living(tmp_path / "run"):
        assert "is in the folder of a run" in refused(tmp_path / "run" / CHECKPOINTS)


@pytest.mark.parametrize("name", [CHECKPOINTS, LOG])
def test_above_a_finished_run_by_the_name_of_a_file(tmp_path: Path, name: str) -> None:
    with_run(tmp_path / "out" / name)
    assert "is the folder of other runs" in refused(tmp_path / "out")


MINE = {"checkpoints/best.ckpt": "precious", "config.yaml": "a: 3", "log": "mine", "notes": "other"}


def of_another_tool(folder: Path, *names: str) -> Path:
    for name in names or MINE:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(MINE.get(name, name))
    return folder


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("names", [(), ("log",), ("checkpoints/best.ckpt",), ("checkpoints/step-3.pt", "config.yaml")])
def test_files_of_the_user_with_names_of_a_run(tmp_path: Path, names: tuple[str, ...]) -> None:
    before = content(of_another_tool(tmp_path / "mine", *names))
    message = refused(tmp_path / "mine")
    assert f"{'config.yaml, log and checkpoints' if not names else names[0].partition('/')[0]}" in message
    assert f"-> out={tmp_path}/mine-2, or overwrite=true" in message
    assert content(tmp_path / "mine") == before
    assert make_folder(str(tmp_path / "mine"), ID, overwrite=True) == tmp_path / "mine"


@pytest.mark.parametrize("name", [LOG, CONFIG, STOP, RECORD])
def test_a_folder_of_the_user_by_the_name_of_a_file(tmp_path: Path, name: str) -> None:
    """It is not removed at all, also where a run has been."""
    of_another_tool(tmp_path / "mine", f"{name}/precious")
    for overwrite in (False, True):
        with pytest.raises(CannotRun) as raised:
            make_folder(str(tmp_path / "mine"), ID, overwrite)
        assert raised.value.problems[0].fixes == ({"out": f"{tmp_path}/mine-2"},)
    (tmp_path / "mine" / LOCK).touch()
    assert f"a folder {name}" in refused(tmp_path / "mine")


@pytest.mark.parametrize("sign", [LOCK, "record", "a damaged record", "a checkpoint"])
def test_a_run_that_began_is_started_again(tmp_path: Path, sign: str) -> None:
    """Also where the first start was killed before its first record, or the folder was copied without the lock."""
    of_another_tool(tmp_path, "config.yaml", "plan.json", "log")
    if sign == "a checkpoint":
        write(tmp_path, RunState(0), lambda file: torch.save({}, file))
    elif sign == "record":
        RunRecord("id", "running").save(tmp_path / RECORD)
    else:
        (tmp_path / (LOCK if sign == LOCK else RECORD)).write_text("{")
    assert make_folder(str(tmp_path), ID) == tmp_path


def test_a_record_of_something_else_is_none_of_ours(tmp_path: Path) -> None:
    of_another_tool(tmp_path, "log")
    (tmp_path / RECORD).write_text('{"artist": "Nina Simone"}')
    assert "record.json and log" in refused(tmp_path)


def test_empty_folders_and_other_files_are_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / CHECKPOINTS).mkdir()
    of_another_tool(tmp_path, "notes", "model.ckpt")
    assert make_folder(str(tmp_path), ID) == tmp_path


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("linked", [True, False])
def test_the_next_run_removes_files_of_runs_alone(tmp_path: Path, overwrite: bool, linked: bool) -> None:
    run = tmp_path / "run"
    names = ["step-3.part", "best.ckpt", "best.part", "step-03.pt", "step-\u0663.pt", "step-4.pt.bak"]
    of_another_tool(run, "log", "notes", *(f"{CHECKPOINTS}/{name}" for name in names))
    if linked:
        (run / CHECKPOINTS).rename(tmp_path / "elsewhere")
        (run / CHECKPOINTS).symlink_to(tmp_path / "elsewhere")
    folder = RunFolder(run, RunRecord("id", "running", config={"overwrite": overwrite}))
    folder.start()
    folder.update()
    folder.accept()
    assert {path.name for path in (run / CHECKPOINTS).iterdir()} == {*names[1:]}
    assert {path.name for path in run.iterdir()} == {"notes", RECORD, CHECKPOINTS}


@pytest.mark.parametrize("out", ["   ", "runs/x ", "runs/ ", "runs/x\t"])
def test_a_name_that_ends_in_blanks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CannotRun) as raised:
        make_folder(out, ID)
    (problem,) = raised.value.problems
    assert (problem.key, problem.message) == ("out", "ends in blanks")
    assert problem.fixes == (({"out": out.rstrip()},) if out.strip() else ()) and not list(tmp_path.iterdir())
    with pytest.raises(CannotRun):
        local.make(Path(out))


def test_a_loop_of_links_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(CannotRun, match="cannot be made a folder"):
        make_folder(str(tmp_path / "loop"), "20250131-235959-1a2b3c")
