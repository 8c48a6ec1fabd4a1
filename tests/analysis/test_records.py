"""Where records come from, what is skipped, and which of several counts."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from analysis import record_archive, records
from harness.core.problem import CannotRun
from harness.core.record import RunRecord, Status


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
    assert records.load([]).messages() == ["0 records"]


def test_the_entries_of_one_and_of_several_races(tmp_path: Path) -> None:
    places = ("one/race.json", "several/a/race.json", "several/b/seed-0/race.json")
    for number, place in enumerate(places):
        save((tmp_path / place).parent / "gpipe", f"entry {number}")
        (tmp_path / place).write_text("{}")
        save((tmp_path / place).parent / ".resumed", "none")
    assert ids(records.load([tmp_path / "several"])) == ["entry 1", "entry 2"]
    assert ids(records.load([tmp_path / "one"])) == ["entry 0"]


def test_all_missing_sources_are_reported_at_once_with_what_makes_them(tmp_path: Path) -> None:
    missing = [tmp_path / f"torchgpipe_table1-paper{suffix}" for suffix in ("", ".jsonl.gz")]
    missing += [tmp_path / "none.jsonl.gz", tmp_path / "none.json"]
    with pytest.raises(CannotRun) as refused:
        records.load(missing)
    assert [problem.key for problem in refused.value.problems] == [str(path) for path in missing]
    assert str(refused.value).count("python run.py -m +sweeps=torchgpipe_table1 scale=paper") == 2


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('{"schema": 0, "id": "x", "status": "ok"}', "expected 1 for a RunRecord, got '0'"),
        ('{"schema": 1, "id": "x", "sta', "is not JSON"),
        ("", "is not JSON"),
        ("\x00\xff", "is not JSON"),
        ("[" * 100000, "is not JSON"),
        ("[" * 70 + "]" * 70, "nested"),
        ('{"schema": 1, "id": "x", "metrics": {"a": ' + "1" * 400 + "}}", "400 digits"),
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
    assert loaded.messages()[1:] == ["skipped 1:", f"  {skipped.place}   {skipped.why}"]


def test_a_folder_without_records_says_which_sweep_makes_them(tmp_path: Path) -> None:
    (tmp_path / "madpipe_fig6").mkdir()
    (skipped,) = records.load([tmp_path / "madpipe_fig6"]).skipped
    assert skipped.why == "has no records   -> python run.py -m +sweeps=madpipe_fig6"


@pytest.mark.parametrize("suffix", [".json", ".jsonl.gz"])
def test_a_file_that_is_no_archive_is_skipped(tmp_path: Path, suffix: str) -> None:
    whole = record_archive.as_bytes([{"id": "a"}])
    contents = [b'{"common": {}', b"{}", b"[]", b'{"common": {}, "groups": [[]]}', whole[:-9], whole[:9] + b"x"]
    for number, content in enumerate(contents):
        (tmp_path / f"{number}{suffix}").write_bytes(content)
    loaded = records.load([*tmp_path.glob(f"*{suffix}")])
    assert [one.why.startswith("is no archive of records") for one in loaded.skipped] == [True] * len(contents)
    assert all(one.why.endswith(f"-> python -m analysis.pack {Path(one.place).name[0]}") for one in loaded.skipped)


def test_the_other_records_of_an_archive_with_a_broken_record_are_read(tmp_path: Path) -> None:
    good = [{"id": name, "status": "ok", "manifest": {}, "config": {}} for name in "ab"]
    path = tmp_path / "sweep.jsonl.gz"
    broken = {"id": "c", "status": "fine", "manifest": {}, "config": {}}
    path.write_bytes(record_archive.as_bytes([broken, *good]) + gzip.compress(b'{"id": "d"'))
    loaded = records.load([path])
    assert ids(loaded) == ["a", "b"] and loaded.records[1].manifest["origin"] == f"{path} record 3"
    assert [one.place for one in loaded.skipped] == [f"{path} record {number}" for number in (1, 4)]


def test_of_a_point_s_records_the_newest_ok_one_counts_and_a_message_says_so(tmp_path: Path) -> None:
    ends = {"old": "ok", "new": "ok", "failed": "oom", "other": "error", "later": "infeasible", "last": "error"}
    for start, (name, status) in enumerate(ends.items()):
        engine = "gpipe" if name in ("old", "new", "failed") else "single"
        save(tmp_path / name, name, status, start, f"engine={engine}", f"out={name}")  # type: ignore[arg-type]
    loaded = records.load([tmp_path])
    newest = records.newest(loaded.records, records.point_of)
    assert {record.id for record in newest.values()} == {"new", "later"}
    assert loaded.messages()[-1] == "of points with several records the newest ok one counts; records that do not: 4"


def test_runs_without_overrides_are_points_of_their_own(tmp_path: Path) -> None:
    loaded = [save(tmp_path / name, name) for name in "ab"]
    assert len(records.newest(loaded, records.point_of)) == 2


def test_a_notebook_shows_no_whole_records(tmp_path: Path) -> None:
    for name in "ab":
        save(tmp_path / name, name)
    (tmp_path / "b" / "record.json").write_text("{}")
    assert repr(records.load([tmp_path])) == f"Loaded(1 records: 1 from {tmp_path}; skipped 1)"


def test_a_run_in_an_archive_and_in_its_folder_counts_once(tmp_path: Path) -> None:
    save(tmp_path / "runs" / "a", "a")
    (loaded,) = records.load([tmp_path / "runs"]).records
    archive = tmp_path / "sweep.jsonl.gz"
    archive.write_bytes(record_archive.as_bytes([record_archive.document(loaded)]))
    both = records.load([archive, tmp_path / "runs"])
    assert ids(both) == ["a"] and both.messages() == [f"1 records: 1 from {archive}"]
