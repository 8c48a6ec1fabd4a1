"""The command of a paper's report: what it prints, writes and refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from analysis import command, report
from analysis.report import Section
from harness.record import RunRecord


def page(folder: Path, drawn: str = "") -> command.Page[list[str]]:
    """Its results are the names of the runs, of which "b" should be there."""
    return command.Page(
        "analysis.paper",
        "About the paper.",
        folder / "out" / "page.md",
        "Paper",
        "From records.",
        ["one", "two"],
        lambda found: [record.id for record in found],
        lambda names: [Section("Runs", ("name",), tuple((name,) for name in names))],
        lambda names: "" if "b" in names else "Not run: b",
        lambda names, where: drawn and f"{drawn} of {len(names)} in {where.name}.",
    )


def record(folder: Path, name: str) -> None:
    RunRecord(name, "ok", "simulated").save(folder / "record.json")


def test_tables_of_the_given_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "runs" / "0", "a")
    assert command.main(page(tmp_path), [str(tmp_path / "runs")]) == 0
    assert [line.strip() for line in capsys.readouterr().out.split("\n")] == ["Runs", "name", "a", "", "Not run: b", ""]
    assert not (tmp_path / "out").exists()


def test_without_folders_those_of_the_sweeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("two", "three"):
        record(Path("runs") / folder / "0", folder)
    assert command.main(page(tmp_path), []) == 0
    told = capsys.readouterr().out
    assert "two" in told and "three" not in told


@pytest.mark.parametrize(("drawn", "intro"), [("", "From records."), ("Picture", "From records. Picture of 1 in out.")])
def test_a_page_is_written(tmp_path: Path, drawn: str, intro: str, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "runs" / "0", "b")
    assert command.main(page(tmp_path, drawn), [str(tmp_path / "runs"), "--write"]) == 0
    written = (tmp_path / "out" / "page.md").read_text()
    assert written.startswith(f"# Paper\n\n{intro}\n\n## Runs\n") and "| b |" in written
    assert capsys.readouterr().out.endswith(f"written to {tmp_path / 'out' / 'page.md'}\n")


def test_commands_of_what_was_not_run_are_code_below_the_introduction(tmp_path: Path) -> None:
    record(tmp_path / "runs" / "0", "a")
    lacking = replace(page(tmp_path, "Picture"), missing=lambda names: report.not_run(["run 1   # 2 of 3", "run 2"]))
    assert command.main(lacking, [str(tmp_path / "runs"), "--write"]) == 0
    written = (tmp_path / "out" / "page.md").read_text()
    intro = "# Paper\n\nFrom records. Picture of 1 in out.\n\nNot run yet, and left out:\n\n"
    assert written.startswith(f"{intro}    run 1   # 2 of 3\n    run 2\n\n## Runs\n")
    assert report.not_run([]) == ""


@pytest.mark.parametrize("content", [None, "{}"])
def test_what_cannot_be_read(tmp_path: Path, content: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "runs"
    if content:
        folder.mkdir()
        (folder / "record.json").write_text(content)
    assert command.main(page(tmp_path), [str(folder)]) == 2
    told = capsys.readouterr()
    assert str(folder) in told.err and not told.out


def test_help_tells_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(page(tmp_path), ["--help"])
    told = capsys.readouterr().out
    assert ended.value.code == 0 and "About the paper." in told and "python -m analysis.paper" in told
