"""The report on MadPipe's figures: which record is which point, and what becomes of each claim."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from analysis import match_records, paper_cli
from analysis.madpipe import period_vs_memory, tables
from analysis.madpipe.claim_checks import BASELINE, CLAIMS, TESTS, verdicts
from analysis.madpipe.fig7 import cell
from analysis.madpipe.page import PAGE
from analysis.madpipe.sweep_results import CONTIGUOUS, MADPIPE, NETWORKS, PIPEDREAM, SWEEPS, Results, Row
from analysis.paper_data import claims
from harness.config.registry import ROOT
from harness.core.record import RunRecord
from tests.analysis.madpipe.published import Change, records


@pytest.fixture(scope="module")
def paper() -> Results:
    return Results(records())


def said(results: Results) -> dict[str, str]:
    return {one.id: one.says for one in verdicts(results)}


def test_claims_hold_for_figures_like_the_papers(paper: Results) -> None:
    assert said(paper) == dict.fromkeys(("MP-1", "MP-2"), "by tests") | dict.fromkeys(CLAIMS, "holds")
    assert {claim.id for claim in claims("madpipe")} == {*CLAIMS, *TESTS}


def test_nothing_is_said_of_what_was_not_run() -> None:
    assert set(said(Results([])).values()) == {"by tests", "not run"}


@pytest.mark.parametrize(
    ("claim", "sweep", "change"),
    [
        ("MP-3", "fig6", lambda row, p: p | {"period_s": p["period_s"] * (0.5 if row.scheme == BASELINE else 1)}),
        ("MP-4", "fig7", lambda row, p: p | {"period_s": p["period_s"] * (0.7 if row.scheme == BASELINE else 1)}),
        ("MP-5", "fig6", lambda row, p: p | {"first_phase_s": p["first_phase_s"] * row.memory_gb}),
        ("MP-5", "fig6", lambda row, p: p | {"first_phase_s": p["period_s"] * 1.1}),
        ("MP-6", "fig7", lambda row, p: p | {"first_phase_s": p["first_phase_s"] * (2 - (row.scheme == MADPIPE))}),
        ("MP-7", "fig8", lambda row, p: p | {"period_s": p["period_s"] * row.memory_gb**2}),
        ("MP-8", "fig8", lambda row, p: p | {"period_s": p["period_s"] / row.bandwidth_gb_s}),
        ("MP-9", "fig7", lambda row, p: p | {"activations": [2 * row.devices - 2]}),
        ("MP-9", "fig7", lambda row, p: p | {"activations": [2 * row.devices]}),
    ],
)
def test_each_claim_can_fail(claim: str, sweep: str, change: Change) -> None:
    assert said(Results(records(change, (sweep,))))[claim] == "does not hold"


def some(keep: Callable[[Row], bool], sweeps: tuple[str, ...] = SWEEPS) -> Results:
    """The paper's figures, of which only a part was run."""
    found = records(sweeps=sweeps)
    return Results([one for one in found if keep(Row(dict(t.split("=", 1) for t in one.manifest["overrides"]), one))])


def test_a_few_points_are_no_verdict() -> None:
    """All but two points of what a claim needs; those of other claims do not matter."""
    partly = some(lambda row: row["planner"] != "madpipe" or row.memory_gb != 8 or row.devices != 5, ("fig6",))
    found = {one.id: (one.says, one.reason) for one in verdicts(partly)}
    assert found["MP-3"] == ("not run", "2 of 144 points were not run: python run.py -m +sweeps=madpipe_fig6")
    assert found["MP-5"] == ("not run", "2 of 392 points were not run: python run.py -m +sweeps=madpipe_fig6")
    assert found["MP-8"] == ("not run", "170 of 224 points were not run: python run.py -m +sweeps=madpipe_fig8"), (
        "the others share points of figure 6"
    )
    without = some(lambda row: row.scheme != CONTIGUOUS and row.memory_gb < 10, ("fig7",))
    assert said(without)["MP-4"] == "holds" and said(without)["MP-9"] == "not run"


def test_where_nothing_fits_there_is_no_verdict() -> None:
    none = Results(replace(one, status="infeasible", predicted={}) for one in records(sweeps=("fig6",)))
    (verdict,) = [one for one in verdicts(none) if one.id == "MP-3"]
    assert (verdict.says, verdict.reason) == ("not run", "no plan fits in any of its points")


def test_rows_of_what_was_not_run_are_left_out_and_counted() -> None:
    partly = some(lambda row: row.devices == 4 and row.memory_gb in (5, 8) and row.network == "ResNet-50", ("fig6",))
    by_title = {section.title: section for section in tables.sections(partly)}
    fig6 = by_title["Fig. 6: periods of ResNet-50, in ms"]
    assert [row[:2] for row in fig6.rows] == [("4", "5"), ("4", "8")]
    assert fig6.notes[-1] == "768 of 784 points were not run; 40 rows have none."
    fig7 = by_title["Fig. 7: ratios of periods"]
    assert fig7.columns[2:] == ("5 GB", "8 GB")
    assert {row[0] for row in fig7.rows} == {"ResNet-50"} and not any("-" in row for row in fig7.rows)
    fits = next(section for title, section in by_title.items() if title.startswith("Instances"))
    assert fits.rows[0][2:] == ("0 of 2", "0 of 2", "0 of 4")
    assert "madpipe_fig6   # 768 of 784 points" in partly.missing()


def test_a_ratio_is_the_mean_over_instances_that_both_can_do(paper: Results) -> None:
    assert cell(paper, "ResNet-50", 4, BASELINE).ratio == pytest.approx(1.8 / 1.2)
    assert cell(paper, "ResNet-50", 4, BASELINE).both == 14
    assert cell(paper, "ResNet-50", 4, BASELINE, first_phase=True).ratio == pytest.approx(1 / (1.2 * 2.5))
    some = []
    for one in records(sweeps=("fig7",)):
        row = Row(dict(text.split("=", 1) for text in one.manifest["overrides"]), one)
        fails = row.scheme == BASELINE and row.devices < 8
        some.append(replace(one, status="infeasible", predicted={}) if fails else one)
    partly = cell(Results(some), "ResNet-50", 4, BASELINE)
    assert (partly.both, partly.only_madpipe, partly.only_other) == (2, 12, 0)
    assert partly.ratio == pytest.approx(1.8 / 1.2)


def test_tables_have_every_network_and_scheme(paper: Results) -> None:
    by_title = {section.title: section for section in tables.sections(paper)}
    fig7 = by_title["Fig. 7: ratios of periods"]
    assert {row[0] for row in fig7.rows} == set(NETWORKS.values())
    assert {row[1] for row in fig7.rows} >= {*PIPEDREAM.values(), CONTIGUOUS}
    assert len(by_title["Fig. 8: speed-up over one device"].rows) == 4 * 2 * 4 * 2
    assert by_title["Fig. 6: periods of ResNet-50, in ms"].rows[0][:4] == ("2", "3", "500", "2700")
    assert paper.missing() == "" and "+sweeps=madpipe_fig7" in Results([]).missing()


def test_the_page(tmp_path: Path) -> None:
    RunRecord("of another sweep", "ok", "simulated").save(tmp_path / "runs" / "record.json")
    assert paper_cli.main(replace(PAGE, path=tmp_path / "madpipe.md"), [str(tmp_path), "--write"]) == 0
    assert "MP-9" in (tmp_path / "madpipe.md").read_text()


def test_periods_against_memory_of_any_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, (planner, gb, period_s) in enumerate(
        [("madpipe", 8, 0.2), ("madpipe", 4, 0.3), ("contiguous", 8, 0.25), ("contiguous", 4, None)]
    ):
        config = {"mode": "plan", "profile": "mine.json", "cluster": {"name": "flat", "memory_gb": gb},
                  "planner": {"name": planner}, "engine": {"name": "gpipe"}, "model": {"name": "unet"}}  # fmt: skip
        status, shown = ("ok", {"period_s": period_s}) if period_s else ("infeasible", {})
        one = RunRecord(str(number), status, "simulated", config=config, predicted=shown)  # type: ignore[arg-type]
        (tmp_path / str(number)).mkdir()
        one.save(tmp_path / str(number) / "record.json")
    assert period_vs_memory.curves(tmp_path) == {
        "planner=madpipe": {4.0: 0.3, 8.0: 0.2}, "planner=contiguous": {4.0: math.inf, 8.0: 0.25}
    }  # fmt: skip
    assert period_vs_memory.main([str(tmp_path), "--out", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").stat().st_size > 10_000
    assert "planner=contiguous: 1 of 2 points have a plan, from 8 GB" in capsys.readouterr().out


def test_a_sweep_over_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert period_vs_memory.main([str(tmp_path / "missing"), "--out", "x.png"]) == 2
    config = {"cluster": {"name": "flat", "memory_gb": 8}, "mode": "plan", "profile": "mine.json",
              "engine": {"name": "gpipe"}, "model": {"name": "unet"}}  # fmt: skip
    RunRecord("x", "ok", "simulated", config=config, predicted={"period_s": 1.0}).save(tmp_path / "record.json")
    assert period_vs_memory.main([str(tmp_path), "--out", "x.png"]) == 2
    assert "no points that differ in their memory   -> cluster.memory_gb=4,8,16" in capsys.readouterr().err


def test_profiles_of_the_sweeps_are_there() -> None:
    used = {point.values()["profile"] for point in match_records.points_of("madpipe_fig7")}
    assert len(used) == 4 and all((ROOT / name).is_file() for name in used)
