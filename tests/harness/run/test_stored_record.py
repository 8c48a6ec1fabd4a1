"""What a reader sees of a record that says "running": the lock of the folder decides."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis import dataframe, losses, records, replay, run_folders
from harness.core.record import RunRecord
from harness.core.run_files import CHECKPOINTS, LOCK, METRICS, RECORD
from harness.run import stored_record
from harness.run.folder_lock import Owner
from slurm import status
from tests.support.lock_holder import holder

GONE = Owner(4_000_000, socket.gethostname())


def left(folder: Path, owner: Owner | None = GONE, **record: Any) -> Path:
    """The folder of a run whose parent was killed."""
    folder.mkdir(exist_ok=True, parents=True)
    begun = RunRecord("id", "running", manifest={"overrides": ["seed=1", f"out={folder}"]})
    replace(begun, **record).save(folder / RECORD)
    if owner:
        (folder / LOCK).write_text(json.dumps(owner.to_json()))
    (folder / METRICS).write_text('{"step": 0, "loss": 2.5}\n')
    return folder


def test_the_lock_decides(tmp_path: Path) -> None:
    folder = left(tmp_path)
    with holder(folder):
        assert stored_record.load(folder).status == "running"
    found = stored_record.load(folder)
    assert found.status == "lost" and "begins again" in found.reason
    (folder / CHECKPOINTS).mkdir()
    (folder / CHECKPOINTS / "step-40.pt").touch()
    assert "resumes after 40 steps" in stored_record.load(folder).reason
    assert RunRecord.load(folder / RECORD).status == "running", "nothing is written"


@pytest.mark.parametrize(
    ("owner", "manifest", "status"),
    [
        (Owner(1, "elsewhere", "12"), {}, "unknown"),
        (None, {"host": "elsewhere"}, "unknown"),
        (None, {"host": socket.gethostname()}, "lost"),
        (None, {}, "unknown"),
    ],
)
def test_who_took_it_last(tmp_path: Path, owner: Owner | None, manifest: dict[str, str], status: str) -> None:
    assert stored_record.load(left(tmp_path, owner, manifest=manifest)).status == status


def test_a_lock_that_cannot_be_opened(tmp_path: Path) -> None:
    left(tmp_path, None)
    (tmp_path / LOCK).symlink_to("nowhere")
    assert stored_record.load(tmp_path).status == "unknown"


@pytest.mark.parametrize("ended", ["ok", "preempted", "error"])
def test_a_run_that_has_ended_stays_as_it_is(tmp_path: Path, ended: Any) -> None:
    record = RunRecord.load(left(tmp_path, status=ended) / RECORD)
    assert stored_record.load(tmp_path) == record


def of_frame(folder: Path) -> str:
    (found,) = dataframe.runs(records.load([folder]).records)["status"]
    return str(found)


READERS: dict[str, Callable[[Path], str]] = {
    "records": lambda folder: records.load([folder]).records[0].status,
    "run_folders": lambda folder: run_folders.load(folder)[0].record.status,
    "frame": of_frame,
    "losses": lambda folder: losses.curves([folder])[0][0].note.split()[2].rstrip(":"),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("sweep", [False, True])
def test_readers_say_lost(tmp_path: Path, reader: str, sweep: bool) -> None:
    folder = left(tmp_path / "point")
    left(folder / ".new")
    assert READERS[reader](tmp_path if sweep else folder) == "lost"
    with holder(folder):
        assert READERS[reader](tmp_path if sweep else folder) == "running"


def test_a_replay_says_lost(tmp_path: Path) -> None:
    with pytest.raises(replay.NoRun, match="lost"):
        replay.step_ratios(left(tmp_path))


def test_losses_names_a_lost_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert losses.main([str(left(tmp_path / "run")), "--out", str(tmp_path / "a.png")]) == 0
    assert "is lost: " in capsys.readouterr().err


def shown(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    assert status.main([str(folder), *more]) == 0
    return capsys.readouterr().out


def test_status_of_a_run_and_of_a_local_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = left(tmp_path / "one")
    assert "1 point: 1 lost" in shown(one, capsys)
    left(tmp_path / "two", status="ok")
    (left(tmp_path / "three") / RECORD).write_text("no record")
    held = left(tmp_path / "four")
    with holder(held):
        text = shown(tmp_path, capsys)
    assert "4 points: 1 ok, 1 lost, 1 missing, 1 running" in text
    assert "begins again" in text
    assert not (tmp_path / "points.csv").exists()


def test_status_of_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main([str(tmp_path)]) == 2
    assert status.main([str(tmp_path / "none")]) == 2
    assert status.main([str(left(tmp_path)), "--only", "error"]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert os.listdir(tmp_path)
