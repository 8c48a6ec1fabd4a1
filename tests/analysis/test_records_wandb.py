"""Runs from Weights & Biases: offline those that our own tracker has left, online with a fake server."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import wandb

from analysis import records, run_artifacts
from harness.core.problem import CannotRun
from harness.core.record import RunRecord
from harness.trackers import wandb as tracking

LOSSES = [1.0, 0.5, 0.25]


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """A run of whose files only those are left that the tracker has kept."""
    folder = tmp_path_factory.mktemp("sweep") / "run"
    folder.mkdir()
    manifest = {"overrides": ["batch.size=16"], "start_time": "2026-01-01"}
    record = RunRecord("id-a", "ok", "measured", config={"batch": {"size": 16}, "out": str(folder)},
                       plan={"mesh": {"data": 1, "pipeline": 2, "tensor": 1}},
                       metrics={"loss": None, "peak_memory_bytes": [1, 2]}, manifest=manifest)  # fmt: skip
    tracker = tracking.build(tracking.Config())
    tracker.start(record.id, "sweep", "gpipe", ["unet"], record.config, folder)
    lines = [{"step": step, "loss": loss} for step, loss in enumerate(LOSSES)]
    for line in lines:
        tracker.log(line["step"], line)  # type: ignore[arg-type]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    record.save(folder / "record.json")
    tracker.finish(record.metrics, {}, record.status)
    for name in tracking.FILES:
        (folder / name).unlink()
    return record


def test_an_offline_run_is_the_record_that_was_tracked(tracked: RunRecord) -> None:
    folder = Path(tracked.config["out"])
    for place in (folder, folder.parent, folder / "wandb"):
        (found,) = records.load([f"wandb:{place}"]).records
        assert run_artifacts.losses(found) == LOSSES
        del found.manifest["origin"]
        assert found == tracked


def test_offline_runs_without_a_record_are_skipped_and_named(tracked: RunRecord, tmp_path: Path) -> None:
    shutil.copytree(Path(tracked.config["out"]) / "wandb", tmp_path / "wandb")
    old = tmp_path / "wandb" / "offline-run-20250101_000000-old" / "files"
    old.mkdir(parents=True)
    loaded = records.load([f"wandb:{tmp_path}"])
    assert len(loaded.records) == 1
    assert [one.place for one in loaded.skipped] == [str(old)] and "record.json" in loaded.skipped[0].why


@dataclass
class File:
    path: Path

    def download(self, root: str, exist_ok: bool) -> None:
        shutil.copy(self.path, root)


@dataclass
class Run:
    """As much as is used of W&B's own."""

    path: list[str]
    folder: Path

    def files(self, names: list[str]) -> list[File]:
        return [File(path) for name in names if (path := self.folder / name).is_file()]


@pytest.mark.usefixtures("computation")
def test_runs_of_a_project_on_the_server(tracked: RunRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (files,) = Path(tracked.config["out"]).rglob("offline-run-*/files")
    simulated = tmp_path / "simulated"
    simulated.mkdir()
    replace(tracked, id="simulated").save(simulated / "record.json")

    class Api:
        def __init__(self, timeout: int) -> None: ...

        def runs(self, path: str) -> list[Run]:
            assert path == "me/regatta"
            runs = {"id-a": files, "simulated": simulated, "other": tmp_path / "none"}
            return [Run(["me", "regatta", name], folder) for name, folder in runs.items()]

    monkeypatch.setattr(wandb, "Api", Api)
    loaded = records.load(["wandb:me/regatta"])
    found, other = sorted(loaded.records, key=lambda record: record.id == "simulated")
    assert other.manifest["origin"] == "wandb:me/regatta/simulated", "it has no steps, and no file of them"
    assert found.manifest["origin"] == "wandb:me/regatta/id-a" and run_artifacts.losses(found) == LOSSES
    assert (found.status, found.plan, found.config) == (tracked.status, tracked.plan, tracked.config)
    assert [one.place for one in loaded.skipped] == ["wandb:me/regatta/other"]


def test_where_wandb_cannot_be_reached_local_records_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**given: Any) -> None:
        raise ConnectionError("no route to host\nand much more")

    monkeypatch.setattr(wandb, "Api", refused)
    RunRecord("local", "ok").save(tmp_path / "record.json")
    loaded = records.load(["wandb:me/regatta", tmp_path])
    assert [one.id for one in loaded.records] == ["local"]
    assert loaded.messages()[1:] == [
        "skipped 1:",
        "  wandb:me/regatta   W&B cannot be reached: no route to host   -> wandb login, or a folder: wandb:FOLDER",
    ]


@pytest.mark.parametrize("place", ["/nonexistent", "./gone", "~/gone", "runs/mine/gone"])
def test_what_can_be_no_project_is_no_folder(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb, "Api", None)
    with pytest.raises(CannotRun, match=f"wandb:{place}   is no folder   -> wandb:FOLDER"):
        records.load([f"wandb:{place}"])
