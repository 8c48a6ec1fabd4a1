"""All claims with their verdicts."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

import pytest

from analysis import changed_checks, claim_check, claims, pack, paper_data
from analysis.claim_check import Check, Finding, check_claims
from analysis.match_records import Need, Points, Row
from analysis.paper_pages import PAGES
from analysis.run_artifacts import MissingData


class Ran(Points[Row]):
    """Results of which everything was run; `right`: whether they are as published."""

    def __init__(self, right: bool) -> None:
        super().__init__("torchgpipe", Row, [], [])
        self.right = right

    def missing_points(self, needs: Iterable[Need[Row]]) -> str:
        return "; ".join(f"run {need.sweep}" for need in needs)


def lacks(results: Ran) -> Finding:
    raise MissingData("losses are not there")


CHECKS: dict[str, Check[Ran]] = {
    "TG-1": Check(lambda results: Finding(results.right, "1", "2", "3")),
    "TG-5": Check(lambda results: Finding(results.right, simulated="4")),
    "TG-2": Check(lambda results: Finding(results.right), (Need("table1"), Need("table2"))),
    "TG-3": Check(lacks),
}
TESTS = {"TG-5": ("tests/a.py::b", "tests/c.py::d"), "TG-13": ("tests/a.py::b",), "TG-2": ("tests/a.py::b",)}
REASONS = {"TG-1": "it was late", "TG-5": "it was late", "TG-2": "never asked"}


def found(right: bool) -> dict[str, claim_check.Verdict]:
    return {one.id: one for one in check_claims("torchgpipe", Ran(right), CHECKS, TESTS, REASONS)}


def figures(verdict: claim_check.Verdict) -> tuple[str, ...]:
    """Verdict, figures and reason."""
    return (verdict.says, verdict.published, verdict.simulated, verdict.measured, verdict.reason)


def test_checks_that_changed_are_those_of_claims_and_shown_with_both_verdicts() -> None:
    with (paper_data.CLAIMS / "changed.csv").open(encoding="utf-8", newline="") as opened:
        rows = list(csv.DictReader(opened))
    known = {claim.id: paper for paper in PAGES for claim in paper_data.claims(paper)}
    assert {row["id"] for row in rows} <= {*known}
    assert {row["earlier_verdict"] for row in rows} == {"holds", "does not hold"}
    says = [claim_check.Verdict("TG-9", "", "holds"), claim_check.Verdict("TG-12", "", "not run")]
    (section,) = changed_checks.sections("torchgpipe", says)
    assert [(row[0], row[3], row[-1]) for row in section.rows] == [("TG-9", "holds", "holds")]
    assert changed_checks.sections("torchgpipe", says[1:]) == []


def test_a_verdict_has_the_figures_of_each_source_and_a_reason() -> None:
    shown = found(False)
    assert list(shown) == [claim.id for claim in paper_data.claims("torchgpipe")]
    assert figures(shown["TG-1"]) == ("does not hold", "1", "2", "3", "it was late")
    exact = "exact in tests/a.py::b and tests/c.py::d"
    assert figures(shown["TG-5"]) == ("does not hold", "", "4", "", f"it was late; {exact}")
    assert figures(shown["TG-13"]) == ("by tests", "", "", "", "exact in tests/a.py::b")
    assert (found(True)["TG-1"].says, found(True)["TG-1"].reason) == ("holds", "")


def test_a_reason_that_ends_a_sentence_goes_on_with_the_tests() -> None:
    reasons = REASONS | {"TG-5": "it was late."}
    (found,) = [one for one in check_claims("torchgpipe", Ran(False), CHECKS, TESTS, reasons) if one.id == "TG-5"]
    assert found.reason == "it was late; exact in tests/a.py::b and tests/c.py::d"


def test_what_was_not_run_says_what_makes_it_or_what_is_missing() -> None:
    shown = found(True)
    reason = "run table1; run table2; exact in tests/a.py::b"
    assert figures(shown["TG-2"]) == ("not run", "", "", "", reason)
    assert figures(shown["TG-3"]) == ("not run", "", "", "", "losses are not there")


def test_the_table_of_claims_has_each_reason_once() -> None:
    shown = check_claims("torchgpipe", Ran(False), CHECKS | {"TG-5": CHECKS["TG-1"]}, {}, REASONS)
    section = claim_check.section(shown)
    assert section.notes[:2] == ("15 claims: 2 does not hold, 2 not run, 11 by tests", "TG-1, TG-5: it was late")
    assert section.rows[0] == ("TG-1", "does not hold", shown[0].claim, "1", "2", "3")
    assert section.rows[1][3:] == ("-", "-", "-")


@pytest.fixture
def nothing_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pack, "ARCHIVES", tmp_path)


@pytest.mark.usefixtures("nothing_run")
def test_every_claim_of_every_paper_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert claims.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split()[0] for line in lines if line.split() and line.split()[0].partition("-")[0] in
            ("TG", "MY", "MP", "AD") and ":" not in line.split()[0] and "," not in line.split()[0]]  # fmt: skip
    assert shown == [one.id for paper in PAGES for one in paper_data.claims(paper)]
    assert "15 claims: 12 not run, 3 by tests" in lines
    assert 80 < max(map(len, lines)) <= 120 and not [line for line in lines if line.endswith(" ")]


@pytest.mark.usefixtures("nothing_run")
@pytest.mark.parametrize("paper", PAGES)
def test_every_claim_that_was_not_run_names_its_sweep(paper: str) -> None:
    verdict = [one for one in PAGES[paper].verdicts(PAGES[paper].results([])) if one.says == "not run"]
    assert verdict
    for one in verdict:
        assert f" points were not run: python run.py -m +sweeps={paper}_" in one.reason, one


@pytest.mark.usefixtures("nothing_run")
def test_some_papers_in_a_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert claims.main(["madpipe", "--format", "markdown"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# The papers' claims\n") and "| MP-3 | not run |" in printed and "TG-1" not in printed
    assert "python run.py -m +sweeps=madpipe_fig6" in printed
    with pytest.raises(SystemExit):
        claims.main(["nobody"])
    assert "torchgpipe" in capsys.readouterr().err
