"""The command of a paper's report: what it prints, writes and refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from analysis import command, pack, report
from analysis.report import Section
from analysis.verdict import Verdict
from harness.record import RunRecord


def page(folder: Path) -> command.Page[list[str]]:
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
        lambda names: [Verdict("P-1", "b is there", "holds" if "b" in names else "not run")],
        lambda names: "" if "b" in names else "Not run: b",
        {},
    )


def record(folder: Path, name: str) -> None:
    RunRecord(name, "ok", "simulated").save(folder / "record.json")


def test_tables_of_the_given_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "runs" / "0", "a")
    assert command.main(page(tmp_path), [str(tmp_path / "runs")]) == 0
    assert [line.strip() for line in capsys.readouterr().out.split("\n")] == ["Runs", "name", "a", "", "Not run: b", ""]
    assert not (tmp_path / "out").exists()


def test_without_folders_those_of_the_packs_and_of_the_sweeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pack, "PACKS", tmp_path / "packs")
    for folder in ("two", "three"):
        record(Path("runs") / folder / "0", folder)
    record(Path("elsewhere") / "one" / "0", "packed")
    pack.write(Path("elsewhere") / "one", tmp_path / "packs")
    assert command.main(page(tmp_path), []) == 0
    told = capsys.readouterr()
    assert "two" in told.out and "packed" in told.out and "three" not in told.out
    assert told.err == f"2 records: 1 from {tmp_path / 'packs' / 'one.json'}, 1 from runs/two\n"
    assert command.main(page(tmp_path), ["runs/three"]) == 0
    told = capsys.readouterr()
    assert "three" in told.out and "packed" not in told.out


def test_a_page_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "runs" / "0", "b")
    assert command.main(page(tmp_path), [str(tmp_path / "runs"), "--write"]) == 0
    written = (tmp_path / "out" / "page.md").read_text()
    assert written.startswith("# Paper\n\nFrom records.\n\n## Runs\n") and "| b |" in written
    assert capsys.readouterr().err.endswith(f"written to {tmp_path / 'out' / 'page.md'}\n")


def test_commands_of_what_was_not_run_are_code_below_the_introduction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "runs" / "0", "a")
    lacking = replace(page(tmp_path), missing=lambda names: report.not_run(["run 1   # 2 of 3", "run 2"]))
    assert command.main(lacking, [str(tmp_path / "runs"), "--write"]) == 0
    written = (tmp_path / "out" / "page.md").read_text()
    intro = "# Paper\n\nFrom records.\n\nNot run yet, and left out:\n\n"
    assert written.startswith(f"{intro}    run 1   # 2 of 3\n    run 2\n\n## Runs\n")
    assert report.not_run([]) == ""
    for form, code in (("html", "<pre>    run 1"), ("latex", "\\begin{verbatim}\n    run 1")):
        capsys.readouterr()
        assert command.main(lacking, [str(tmp_path / "runs"), "--format", form]) == 0
        assert code in capsys.readouterr().out


@pytest.mark.parametrize(("form", "cell"), [("markdown", "| b |"), ("latex", r"b \\"), ("html", "<tr><td>b</td></tr>")])
def test_formats(tmp_path: Path, form: str, cell: str, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "runs" / "0", "b")
    assert command.main(page(tmp_path), [str(tmp_path / "runs"), "--format", form]) == 0
    assert cell in capsys.readouterr().out.splitlines()


def test_sources_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(page(tmp_path), [str(tmp_path / "gone")]) == 2
    told = capsys.readouterr()
    assert str(tmp_path / "gone") in told.err and not told.out


def test_a_folder_without_records_says_what_makes_them_and_prints_no_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    paper = replace(page(tmp_path), sweeps=["torchgpipe_table1-paper", "madpipe_fig6"])
    assert command.main(paper, [str(tmp_path / "empty"), "--write"]) == 2
    told = capsys.readouterr()
    assert not told.out and not (tmp_path / "out").exists()
    assert told.err.splitlines() == [
        "0 records", "skipped 1:", f"  {tmp_path / 'empty'}   has no records", "the records of this paper are made by",
        "    python run.py -m +sweeps=torchgpipe_table1 scale=paper", "    python run.py -m +sweeps=madpipe_fig6",
    ]  # fmt: skip


def test_what_is_no_record_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "good", "b")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "record.json").write_text("{}")
    assert command.main(page(tmp_path), [str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert "skipped 1" in told.err and str(tmp_path / "bad") in told.err and "b" in told.out


def test_help_tells_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(page(tmp_path), ["--help"])
    told = capsys.readouterr().out
    assert ended.value.code == 0 and "About the paper." in told and "python -m analysis.paper" in told
