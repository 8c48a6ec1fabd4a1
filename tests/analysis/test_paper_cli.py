"""The command of a paper's report: what it prints, writes and refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis import pack, paper_cli, paper_pages, report
from analysis.claim_check import Verdict
from analysis.report import Section
from harness.core.record import RunRecord


class Names(list[str]):
    """Of which "stranger" is of another paper."""

    def others(self) -> int:
        return self.count("stranger")


def page(folder: Path) -> paper_cli.Page[Any]:
    """Its results are the names of the runs, of which "b" should be there."""
    return paper_cli.Page(
        "analysis.paper",
        "About the paper.",
        folder / "out" / "page.md",
        "Paper",
        "From records.",
        ["one", "two"],
        lambda found: Names(record.id for record in found),
        lambda names: [Section("Runs", ("name",), tuple((name,) for name in names))],
        lambda names: [Verdict("P-1", "b is there", "holds" if "b" in names else "not run")],
        lambda names: "" if "b" in names else "Not run: b",
        {},
    )


def record(folder: Path, name: str) -> None:
    RunRecord(name, "ok", "simulated").save(folder / "record.json")


def test_tables_of_the_given_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "runs" / "0", "a")
    assert paper_cli.main(page(tmp_path), [str(tmp_path / "runs")]) == 0
    assert [line.strip() for line in capsys.readouterr().out.split("\n")] == ["Runs", "name", "a", "", "Not run: b", ""]
    assert not (tmp_path / "out").exists()


def test_records_of_another_paper_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "stranger"):
        record(tmp_path / "runs" / name, name)
    paper_cli.main(page(tmp_path), [str(tmp_path / "runs")])
    assert "of no sweep of this paper, and left out: 1;" in capsys.readouterr().err


@pytest.mark.parametrize(("paper", "others"), [("torchgpipe", True), ("madpipe", False)])
def test_a_paper_knows_its_points(paper: str, others: bool, capsys: pytest.CaptureFixture[str]) -> None:
    archive = pack.ARCHIVES / "madpipe_fig6.jsonl.gz"
    paper_cli.main(paper_pages.PAGES[paper], [str(archive)])
    printed = capsys.readouterr()
    assert ("no sweep of this paper" in printed.err) == others
    assert max(map(len, printed.out.splitlines())) <= paper_cli.WIDTH


def test_without_folders_those_of_the_archives_and_of_the_sweeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pack, "ARCHIVES", tmp_path / "archives")
    for folder in ("two", "three"):
        record(Path("runs") / folder / "0", folder)
    record(Path("elsewhere") / "one" / "0", "packed")
    pack.write(Path("elsewhere") / "one", tmp_path / "archives")
    assert paper_cli.main(page(tmp_path), []) == 0
    printed = capsys.readouterr()
    assert "two" in printed.out and "packed" in printed.out and "three" not in printed.out
    assert printed.err == f"2 records: 1 from {tmp_path / 'archives' / 'one.jsonl.gz'}, 1 from runs/two\n"
    assert paper_cli.main(page(tmp_path), ["runs/three"]) == 0
    printed = capsys.readouterr()
    assert "three" in printed.out and "packed" not in printed.out


def test_a_page_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "runs" / "0", "b")
    assert paper_cli.main(page(tmp_path), [str(tmp_path / "runs"), "--write"]) == 0
    written = (tmp_path / "out" / "page.md").read_text()
    assert written.startswith("# Paper\n\nFrom records.\n\n## Runs\n") and "| b |" in written
    assert capsys.readouterr().err.endswith(f"written to {tmp_path / 'out' / 'page.md'}\n")


def test_commands_of_what_was_not_run_are_code_below_the_introduction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "runs" / "0", "a")
    incomplete = replace(page(tmp_path), missing=lambda names: report.not_run(["run 1   # 2 of 3", "run 2"]))
    assert paper_cli.main(incomplete, [str(tmp_path / "runs"), "--write"]) == 0
    written = (tmp_path / "out" / "page.md").read_text()
    intro = "# Paper\n\nFrom records.\n\nNot run yet, and left out:\n\n"
    assert written.startswith(f"{intro}    run 1   # 2 of 3\n    run 2\n\n## Runs\n")
    assert report.not_run([]) == ""
    for form, code in (("html", "<pre>    run 1"), ("latex", "\\begin{verbatim}\n    run 1")):
        capsys.readouterr()
        assert paper_cli.main(incomplete, [str(tmp_path / "runs"), "--format", form]) == 0
        assert code in capsys.readouterr().out


@pytest.mark.parametrize(("form", "cell"), [("markdown", "| b |"), ("latex", r"b \\"), ("html", "<tr><td>b</td></tr>")])
def test_formats(tmp_path: Path, form: str, cell: str, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "runs" / "0", "b")
    assert paper_cli.main(page(tmp_path), [str(tmp_path / "runs"), "--format", form]) == 0
    assert cell in capsys.readouterr().out.splitlines()


def test_sources_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert paper_cli.main(page(tmp_path), [str(tmp_path / "gone")]) == 2
    printed = capsys.readouterr()
    assert str(tmp_path / "gone") in printed.err and not printed.out


def test_a_folder_without_records_says_what_makes_them_and_prints_no_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    paper = replace(page(tmp_path), sweeps=["torchgpipe_table1-paper", "madpipe_fig6"])
    assert paper_cli.main(paper, [str(tmp_path / "empty"), "--write"]) == 2
    printed = capsys.readouterr()
    assert not printed.out and not (tmp_path / "out").exists()
    assert printed.err.splitlines() == [
        "0 records", "skipped 1:", f"  {tmp_path / 'empty'}   has no records", "the records of this paper are made by",
        "    python run.py -m +sweeps=torchgpipe_table1 scale=paper", "    python run.py -m +sweeps=madpipe_fig6",
    ]  # fmt: skip


def test_what_is_no_record_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "good", "b")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "record.json").write_text("{}")
    assert paper_cli.main(page(tmp_path), [str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "skipped 1" in printed.err and str(tmp_path / "bad") in printed.err and "b" in printed.out


def test_help_says_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        paper_cli.main(page(tmp_path), ["--help"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0 and "About the paper." in printed and "python -m analysis.paper" in printed
