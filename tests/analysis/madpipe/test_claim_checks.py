"""The report on MadPipe's figures: which record is which point, and what becomes of each claim."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from analysis import match_records, paper_cli
from analysis.madpipe import activation_profiles, period_vs_memory, tables
from analysis.madpipe.claim_checks import CLAIMS, TESTS, verdicts
from analysis.madpipe.fig7 import cell
from analysis.madpipe.page import PAGE
from analysis.madpipe.sweep_results import (
    ALL_OF_THEM,
    BASELINE,
    CONTIGUOUS,
    EXACT,
    NETWORKS,
    PERCENTS,
    PIPEDREAM,
    PUBLISHED,
    SENTENCE,
    Results,
    Row,
)
from analysis.paper_data import claims
from harness.config.registry import ROOT
from harness.core.model_profile import ModelProfile
from harness.core.record import RunRecord
from tests.analysis.madpipe.published import ALL_SWEEPS, Change, records


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


def of(scheme: str, figure: str, factor: float) -> Change:
    """One figure of one scheme, so many times as large."""
    return lambda row, p: p | {figure: p[figure] * factor} if row.scheme == scheme else p


@pytest.mark.parametrize(
    ("claim", "change"),
    [
        ("MP-3", of(BASELINE, "period_s", 0.59)),
        ("MP-3", of(BASELINE, "period_s", 0.9)),
        ("MP-4", of(BASELINE, "period_s", 0.59)),
        ("MP-5", lambda row, p: p | {"first_phase_s": p["first_phase_s"] * row.memory_gb}),
        ("MP-5", of(BASELINE, "first_phase_s", 4.0)),
        ("MP-5", of(PUBLISHED, "first_phase_s", 1.8)),
        ("MP-6", of(BASELINE, "first_phase_s", 2.0)),
        ("MP-6", of(BASELINE, "period_s", 0.4)),
        ("MP-7", lambda row, p: p | {"period_s": p["period_s"] * row.memory_gb**2}),
        ("MP-8", lambda row, p: p | {"period_s": p["period_s"] / row.bandwidth_gb_s}),
        ("MP-9", lambda row, p: p | {"activations": [2 * row.devices - 2]}),
        ("MP-9", lambda row, p: p | {"activations": [2 * row.devices]}),
    ],
)
@pytest.mark.usefixtures("computation")
def test_each_claim_can_fail(claim: str, change: Change) -> None:
    assert said(Results(records(change)))[claim] == "does not hold"


@pytest.mark.usefixtures("computation")
def test_the_papers_own_planner_is_judged_and_not_ours() -> None:
    better = Results(records(lambda row, p: {**p, "period_s": p["period_s"] * 9} if row.scheme == EXACT else p))
    assert said(better) == dict.fromkeys(("MP-1", "MP-2"), "by tests") | dict.fromkeys(CLAIMS, "holds")
    worse = said(Results(records(of(PUBLISHED, "period_s", 9.0))))
    assert worse["MP-3"] == worse["MP-4"] == worse["MP-7"] == "does not hold"


def test_each_reading_of_pipedream_is_named_with_its_verdict(paper: Results) -> None:
    close = {one.id: one for one in verdicts(Results(records(of(SENTENCE, "period_s", 0.4))))}
    for claim in ("MP-3", "MP-4", "MP-6"):
        parts = close[claim].simulated.split("; ")
        (sentence,) = [part for part in parts if SENTENCE in part]
        assert "(the paper's sentence)" in sentence and parts.index(sentence) > 0
        assert all(any(name in part for part in parts) for name in PIPEDREAM.values())
        assert "does not hold" in close[claim].simulated.partition(sentence.split(":")[0])[2].partition("PipeDream")[0]
        assert close[claim].says == "holds", "the reading of its public code decides"


@pytest.mark.parametrize(("steps", "verdict"), [(0.9, "holds"), (1.1, "does not hold")])
@pytest.mark.usefixtures("computation")
def test_a_grid_may_round_a_first_phase_up_by_one_step(steps: float, verdict: str) -> None:
    def change(row: Row, predicted: dict[str, object]) -> dict[str, object]:
        later = row.scheme == PUBLISHED and row.memory_gb == 9
        return predicted | {"first_phase_s": 1.1 / row.devices + 0.01 * steps} if later else predicted

    assert said(Results(records(change)))["MP-5"] == verdict


@pytest.mark.usefixtures("computation")
def test_stages_on_several_devices_are_no_consecutive_plan() -> None:
    """More than 2P - 1 is what a device with several stages may store; nothing is said of it."""
    several = {"stages": [{"device": 0}, {"device": 1}, {"device": 0}]}
    found = []
    for one in records():
        row = Row(dict(text.split("=", 1) for text in one.manifest["overrides"]), one)
        if row.scheme == CONTIGUOUS and row.memory_gb > 3:
            one = replace(one, plan=several, predicted=one.predicted | {"activations": [99]})
        found.append(one)
    assert said(Results(found))["MP-9"] == "holds"


def some(keep: Callable[[Row], bool], sweeps: tuple[str, ...] = ALL_SWEEPS) -> Results:
    """The paper's figures, of which only a part was run."""
    found = records(sweeps=sweeps)
    return Results([one for one in found if keep(Row(dict(t.split("=", 1) for t in one.manifest["overrides"]), one))])


@pytest.mark.usefixtures("computation")
def test_a_few_points_are_no_verdict() -> None:
    """All but two points of what a claim needs; those of other claims do not matter."""
    partly = some(lambda row: row.scheme != PUBLISHED or row.memory_gb != 8 or row.devices != 5)
    found = {one.id: (one.says, one.reason) for one in verdicts(partly)}
    assert found["MP-3"] == ("not run", "2 of 72 points were not run: python run.py -m +sweeps=madpipe_published")
    assert found["MP-5"] == ("not run", "2 of 196 points were not run: python run.py -m +sweeps=madpipe_published")
    assert found["MP-8"] == ("not run", "8 of 224 points were not run: python run.py -m +sweeps=madpipe_published")
    without = some(lambda row: row.scheme != CONTIGUOUS and row.memory_gb < 10)
    assert said(without)["MP-4"] == "holds" and said(without)["MP-9"] == "not run"
    (band,) = [one for one in verdicts(some(lambda row: row.percent != 75)) if one.id == "MP-4"]
    assert band.says == "holds", "the band decides nothing"
    assert "with other activations 1176 of 2352 points were not run" in band.simulated


@pytest.mark.usefixtures("computation")
def test_where_nothing_fits_there_is_no_verdict() -> None:
    none = Results(replace(one, status="infeasible", predicted={}) for one in records())
    (verdict,) = [one for one in verdicts(none) if one.id == "MP-3"]
    assert (verdict.says, verdict.reason) == ("not run", "no plan fits in any of its points")


def test_rows_of_what_was_not_run_are_left_out_and_counted() -> None:
    partly = some(
        lambda row: row.devices == 4 and row.memory_gb in (5, 8) and row.network == "ResNet-50", ("fig6", ALL_OF_THEM)
    )
    by_title = {section.title: section for section in tables.sections(partly)}
    fig6 = by_title["Fig. 6: periods of ResNet-50, in ms"]
    assert [row[:2] for row in fig6.rows] == [("4", "5"), ("4", "8")]
    assert fig6.notes[-1] == "576 of 588 points were not run; 40 rows have none."
    fig7 = by_title["Fig. 7: ratios of periods"]
    assert fig7.columns[2:] == ("5 GB", "8 GB")
    assert {row[0] for row in fig7.rows} == {"ResNet-50"} and not any("-" in row for row in fig7.rows)
    fits = next(section for title, section in by_title.items() if title.startswith("Instances"))
    assert fits.rows[0][2:] == ("0 of 2", "0 of 2", "0 of 4")
    assert "madpipe_fig6   # 576 of 588 points" in partly.missing()


def test_a_ratio_is_the_mean_over_instances_that_both_can_do(paper: Results) -> None:
    schemes = paper.by_scheme("fig7")
    assert cell(schemes, "ResNet-50", 4, BASELINE).ratio == pytest.approx(2.4 / 1.2)
    assert cell(schemes, "ResNet-50", 4, BASELINE).both == 14
    assert cell(schemes, "ResNet-50", 4, BASELINE, first_phase=True).ratio == pytest.approx(1 / (1.2 * 2.5))
    assert cell(schemes, "ResNet-50", 4, BASELINE, madpipe=EXACT).ratio == pytest.approx(2.4 / 1.15)
    some = []
    for one in records(sweeps=("fig7", ALL_OF_THEM)):
        row = Row(dict(text.split("=", 1) for text in one.manifest["overrides"]), one)
        fails = row.scheme == BASELINE and row.devices < 8
        some.append(replace(one, status="infeasible", predicted={}) if fails else one)
    partly = cell(Results(some).by_scheme("fig7"), "ResNet-50", 4, BASELINE)
    assert (partly.both, partly.only_madpipe, partly.only_other) == (2, 12, 0)
    assert partly.ratio == pytest.approx(2.4 / 1.2)


def test_tables_have_every_network_and_scheme(paper: Results) -> None:
    by_title = {section.title: section for section in tables.sections(paper)}
    fig7 = by_title["Fig. 7: ratios of periods"]
    assert {row[0] for row in fig7.rows} == set(NETWORKS.values())
    assert {row[1] for row in fig7.rows} >= {*PIPEDREAM.values(), CONTIGUOUS}
    assert len(by_title["Fig. 8: speed-up over one device"].rows) == 4 * 2 * 4 * 3
    assert by_title["Fig. 6: periods of ResNet-50, in ms"].rows[0][:4] == ("2", "3", "500", "3600")
    band = by_title["Fig. 7 below 10 GB, with other activations"]
    assert {row[2] for row in band.rows} == {"75 %", "100 %", "125 %"} and {row[3] for row in band.rows} == {"2.00"}
    assert paper.missing() == "" and "+sweeps=madpipe_fig7" in Results([]).missing()


@pytest.mark.usefixtures("computation")
def test_the_page_says_in_how_many_instances_the_papers_plan_loses(paper: Results) -> None:
    title = "MadPipe, as published, against the best contiguous plan"
    (whole,) = [section for section in tables.sections(paper) if section.title == title]
    assert [row[1] for row in whole.rows] == ["196 of 196"] * 4 + ["784 of 784"]
    assert whole.notes[0].startswith("The paper's planner has ended in 784 of 784 instances; in 0 of them")
    found = []
    for one in records():
        row = Row(dict(text.split("=", 1) for text in one.manifest["overrides"]), one)
        if row.scheme == PUBLISHED and row.memory_gb == 3:  # 56 instances, 14 of each network
            if row.devices == 2:
                continue
            fits = row.devices < 8
            own = one.predicted | {"period_s": one.predicted["period_s"] * 2, "finished": row.devices != 5}
            one = replace(one, predicted=own) if fits else replace(one, status="infeasible", predicted={})
        found.append(one)
    (partly,) = [section for section in tables.sections(Results(found)) if section.title == title]
    last = dict(zip(partly.columns, partly.rows[-1], strict=True))
    assert last["ended"] == "776 of 784" and (last["optimum proven"], last["60 s reached"]) == ("760", "8")
    assert (last["no plan"], last["longer"], last["only contiguous has a plan"]) == ("8", "40", "8")
    assert partly.notes[0].startswith("The paper's planner has ended in 776 of 784 instances; in 40 of them")


def test_changed_checks_have_both_verdicts(paper: Results) -> None:
    changed = tables.sections(paper)[-1]
    assert changed.title == "Changed checks" and [row[0] for row in changed.rows] == [*CLAIMS]
    before = dict(zip(CLAIMS, ["holds"] + ["does not hold"] * 3 + ["holds"] * 2 + ["does not hold"], strict=True))
    assert {row[0]: row[3] for row in changed.rows} == before
    assert {row[6] for row in changed.rows} == {"holds"}


def test_profiles_of_the_band_have_other_activations_and_nothing_else_that_counts() -> None:
    used = {point.values()["profile"] for point in match_records.points_of("madpipe_activations")}
    assert len(used) == len(NETWORKS) * len(PERCENTS)
    for network in NETWORKS:
        original = ModelProfile.load(activation_profiles.PROFILES / f"{network}_1000.json")
        for percent in PERCENTS:
            path = activation_profiles.path(network, percent)
            one = ModelProfile.load(path)
            assert str(path.relative_to(ROOT)) in used and one == activation_profiles.scaled(original, percent)
            sizes = [layer.output_bytes * percent // 100 for layer in original.layers]
            assert [layer.output_bytes for layer in one.layers] == sizes
            assert [
                (layer.forward_s, layer.backward_s, layer.param_bytes, layer.buffer_bytes) for layer in one.layers
            ] == [
                (layer.forward_s, layer.backward_s, layer.param_bytes, layer.buffer_bytes) for layer in original.layers
            ]


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
