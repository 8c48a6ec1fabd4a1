from __future__ import annotations

import os
from pathlib import Path

import pytest
from rich.console import Console

from analysis import records, report
from harness.problem import CannotRun
from harness.record import RunRecord
from harness.serial import SchemaError


def test_records_of_folders_the_oldest_first(tmp_path: Path) -> None:
    for number, name in enumerate(("sweep/b", "sweep/a", "alone", "sweep/a/deeper")):
        path = tmp_path / name / "record.json"
        RunRecord(name, "ok").save(path)
        os.utime(path, (number, number))
    (tmp_path / "sweep" / "note.txt").write_text("no record")
    found = records.load([tmp_path / "alone", tmp_path / "sweep", tmp_path / "sweep"])
    assert [record.id for record in found] == ["sweep/b", "sweep/a", "alone"]
    assert records.load([]) == []


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotRun, match=r"gone +is not a folder"):
        records.load([tmp_path / "gone"])
    (tmp_path / "record.json").write_text("{")
    with pytest.raises(SchemaError, match=r"record\.json"):
        records.load([tmp_path])


def test_a_section_as_text_and_as_markdown() -> None:
    section = report.Section("A title", ("row", "paper"), (("one", "1.0"), ("a|b", "22.0")), ("A note.",))
    assert report.markdown("Page", "Made by hand.", [section]) == (
        "# Page\n\nMade by hand.\n\n## A title\n\n"
        "| row | paper |\n| :-- | --: |\n| one | 1.0 |\n| a\\|b | 22.0 |\n\nA note.\n"
    )
    with (console := Console(width=40)).capture() as captured:
        report.show([section], console)
    assert [line.rstrip() for line in captured.get().splitlines()] == [
        "A title", "row  paper", "one    1.0", "a|b   22.0", "A note.", "",
    ]  # fmt: skip
