"""The report on MadPipe's figures: which record is which point, and what becomes of each claim."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis import command, points
from analysis.madpipe import __main__ as report
from analysis.madpipe import picture, tables
from analysis.madpipe.ratios import cell
from analysis.madpipe.rows import CONTIGUOUS, MADPIPE, NETWORKS, PIPEDREAM, PUBLISHED, SWEEPS, Results, Row
from analysis.madpipe.verdicts import BASELINE, CLAIMS, TESTS, verdicts
from analysis.published import claims
from harness.record import RunRecord
from harness.registry import ROOT

Change = Callable[[Row, dict[str, Any]], dict[str, Any]]


def records(change: Change = lambda row, predicted: predicted, sweeps: tuple[str, ...] = SWEEPS) -> list[RunRecord]:
    """Every point as the paper would have it: what memory forbids makes PipeDream slower than MadPipe."""
    found = []
    for sweep in sweeps:
        for point in points.points_of(f"madpipe_{sweep}"):
            row = Row(point.values(), None)
            tight = 1 + 6 / row.memory_gb
            hopes = 1 / row.devices * {MADPIPE: 1.1, PUBLISHED: 1.15}.get(row.scheme, 1.0)
            period = tight / row.devices * {MADPIPE: 1.2, PUBLISHED: 1.25, CONTIGUOUS: 1.3}.get(row.scheme, 1.8)
            predicted = {"period_s": period, "first_phase_s": hopes, "one_device_s": 1.0,
                         "activations": [2 * row.devices - 1, 1]}  # fmt: skip
            overrides = [f"{key}={value}" for key, value in point.values().items()]
            found.append(
                RunRecord("x", "ok", "simulated", predicted=change(row, predicted), manifest={"overrides": overrides})
            )
    return found


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
    assert by_title["Fig. 6: periods of ResNet-50"].rows[0][:4] == ("2", "3", "500", "2700")
    assert tables.missing(paper) == "" and "+sweeps=madpipe_fig7" in tables.missing(Results([]))


def test_the_page_and_its_picture(tmp_path: Path, paper: Results) -> None:
    assert picture.draw(paper, tmp_path / "fig6.png") and (tmp_path / "fig6.png").stat().st_size > 20_000
    assert not picture.draw(Results([]), tmp_path / "none.png")
    assert command.main(replace(report.PAGE, path=tmp_path / "madpipe.md"), [str(tmp_path), "--write"]) == 0
    assert "MP-9" in (tmp_path / "madpipe.md").read_text()


def test_profiles_of_the_sweeps_are_there() -> None:
    used = {point.values()["profile"] for point in points.points_of("madpipe_fig7")}
    assert len(used) == 4 and all((ROOT / name).is_file() for name in used)
