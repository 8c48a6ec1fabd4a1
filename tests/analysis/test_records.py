"""Where records come from, what is skipped, and which of several counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis import packed, records
from harness.problem import CannotRun
from harness.record import RunRecord, Status


def save(folder: Path, name: str, status: Status = "ok", start: int = 0, *overrides: str) -> RunRecord:
    manifest: dict[str, Any] = {"start_time": f"2026-01-01T00:00:{start:02}", "overrides": list(overrides)}
    record = RunRecord(name, status, manifest=manifest)
    record.save(folder / "record.json")
    return record


def ids(loaded: records.Loaded) -> list[str]:
    return [record.id for record in loaded.records]


def test_records_of_folders_the_oldest_first(tmp_path: Path) -> None:
    for number, name in enumerate(("sweep/b", "sweep/a", "alone", "sweep/a/deeper")):
        save(tmp_path / name, name, "ok", number)
    (tmp_path / "sweep" / "note.txt").write_text("no record")
    loaded = records.load([tmp_path / "alone", tmp_path / "sweep", tmp_path / "sweep"])
    assert ids(loaded) == ["sweep/b", "sweep/a", "alone"] and not loaded.skipped
    assert loaded.records[0].manifest["origin"] == str(tmp_path / "sweep" / "b")
    assert records.load([]).told() == ["0 records"]


def test_sources_that_are_not_there_are_told_at_once_with_what_makes_them(tmp_path: Path) -> None:
    gone = [tmp_path / "torchgpipe_table1-paper", tmp_path / "gone.json"]
    with pytest.raises(CannotRun) as refused:
        records.load(gone)
    told = str(refused.value)
    assert "python run.py -m +sweeps=torchgpipe_table1 scale=paper" in told and "gone.json" in told


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('{"schema": 0, "id": "x", "status": "ok"}', "expected 1 for a RunRecord, got '0'"),
        ('{"schema": 1, "id": "x", "sta', "cannot be read"),
        ("", "cannot be read"),
        ("\x00\xff", "cannot be read"),
        ("[]", "expected an object"),
        ('{"schema": 1, "id": "x", "status": "fine"}', "status: expected one of"),
        ('{"schema": 1, "id": "x", "status": "ok", "more": 1}', "expected only the keys of RunRecord"),
    ],
)
def test_what_is_no_record_is_skipped_counted_and_named(tmp_path: Path, content: str, why: str) -> None:
    save(tmp_path / "good", "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "record.json").write_text(content, encoding="latin-1")
    loaded = records.load([tmp_path])
    assert ids(loaded) == ["good"]
    (skipped,) = loaded.skipped
    assert skipped.place == str(tmp_path / "bad") and why in skipped.why
    assert loaded.told()[1:] == ["skipped 1:", f"  {skipped.place}   {skipped.why}"]


def test_a_folder_without_records_says_which_sweep_makes_them(tmp_path: Path) -> None:
    (tmp_path / "madpipe_fig6").mkdir()
    (skipped,) = records.load([tmp_path / "madpipe_fig6"]).skipped
    assert skipped.why == "has no records   -> python run.py -m +sweeps=madpipe_fig6"


def test_a_file_that_is_no_pack_is_skipped(tmp_path: Path) -> None:
    for number, content in enumerate(('{"common": {}', "{}", "[]")):
        (tmp_path / f"{number}.json").write_text(content)
    loaded = records.load([*tmp_path.glob("*.json")])
    assert [one.why.startswith("is no pack") for one in loaded.skipped] == [True] * 3


def test_a_pack_s_broken_record_leaves_the_others(tmp_path: Path) -> None:
    good = [{"id": name, "status": "ok", "manifest": {}, "config": {}} for name in "ab"]
    path = tmp_path / "sweep.json"
    path.write_text(packed.as_text([*good, {"id": "c", "status": "fine", "manifest": {}, "config": {}}]))
    loaded = records.load([path])
    assert ids(loaded) == ["a", "b"] and loaded.records[1].manifest["origin"] == f"{path} record 3"
    assert [one.place for one in loaded.skipped] == [f"{path} record 1"]


def test_of_a_point_s_records_the_newest_ok_one_counts_and_that_is_said(tmp_path: Path) -> None:
    ends = {"old": "ok", "new": "ok", "failed": "oom", "other": "error", "later": "infeasible", "last": "error"}
    for start, (name, status) in enumerate(ends.items()):
        engine = "gpipe" if name in ("old", "new", "failed") else "single"
        save(tmp_path / name, name, status, start, f"engine={engine}", f"out={name}")  # type: ignore[arg-type]
    loaded = records.load([tmp_path])
    newest = records.newest(loaded.records, records.point_of)
    assert {record.id for record in newest.values()} == {"new", "later"}
    assert loaded.told()[-1] == "of points with several records the newest ok one counts; records that do not: 4"


def test_runs_without_overrides_are_points_of_their_own(tmp_path: Path) -> None:
    loaded = [save(tmp_path / name, name) for name in "ab"]
    assert len(records.newest(loaded, records.point_of)) == 2


def test_a_notebook_shows_no_whole_records(tmp_path: Path) -> None:
    for name in "ab":
        save(tmp_path / name, name)
    (tmp_path / "b" / "record.json").write_text("{}")
    assert repr(records.load([tmp_path])) == f"Loaded(1 records: 1 from {tmp_path}; skipped 1)"


def test_the_same_run_in_a_pack_and_in_its_folder_counts_once(tmp_path: Path) -> None:
    save(tmp_path / "runs" / "a", "a")
    (loaded,) = records.load([tmp_path / "runs"]).records
    (tmp_path / "sweep.json").write_text(packed.as_text([packed.document(loaded)]))
    loaded = records.load([tmp_path / "sweep.json", tmp_path / "runs"])
    assert ids(loaded) == ["a"] and loaded.told() == [f"1 records: 1 from {tmp_path / 'sweep.json'}"]
