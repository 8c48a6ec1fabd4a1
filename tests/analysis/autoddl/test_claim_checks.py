"""The report on AutoDDL's figures: which record is which point, and what becomes of each claim."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis import paper_cli
from analysis.autoddl import cube_volume, fig3_fig4, fig9_fig10, table1, tables
from analysis.autoddl.claim_checks import CLAIMS, DENSE, TESTS, verdicts
from analysis.autoddl.fig8 import Curve
from analysis.autoddl.fig9_fig10 import CLOUD_VGG, LARGE, SCHEMES, SMALL, STAGED, TRANSFORMERS, VGG
from analysis.autoddl.page import PAGE
from analysis.autoddl.sweep_results import SWEEPS, Results, Row, fastest, smallest, sweep_points
from analysis.paper_data import claims
from harness.config.registry import ROOT
from harness.core.record import RunRecord
from tests.analysis.autoddl.published import (
    as_published,
    fig3,
    fig4,
    fig7,
    fig8,
    plan,
    record,
    simulated,
    table2,
    table3,
)

CUBES = "AD-5"
"""A claim that needs no record."""


def said(records: list[RunRecord]) -> dict[str, str]:
    return {verdict.id: verdict.says for verdict in verdicts(Results(records))}


def changed(records: list[RunRecord], keep: Callable[[dict[str, str]], bool], **changes: Any) -> list[RunRecord]:
    """Records whose overrides are like this with other fields."""

    def values(one: RunRecord) -> dict[str, str]:
        return dict(text.split("=", 1) for text in one.manifest["overrides"])

    return [replace(one, **changes) if keep(values(one)) else one for one in records]


@pytest.mark.usefixtures("computation")
def test_every_point_of_every_sweep_is_a_row_of_its_own() -> None:
    for name in SWEEPS:
        own = sweep_points(name)
        assert len({frozenset(point.overrides) for point in own}) == len(own)
        results = Results(record(point.values(), reason=str(number)) for number, point in enumerate(own))
        rows = results.rows(name)
        assert [row.record and row.record.reason for row in rows] == [str(number) for number in range(len(own))]
        assert results.was_run(name)


def test_settings_have_points_of_every_scheme() -> None:
    results = Results([])
    for setting in (*VGG, *TRANSFORMERS, *CLOUD_VGG, SMALL, LARGE):
        for scheme in SCHEMES:
            rows = setting.rows(results, scheme)
            assert rows, (setting, scheme)
            assert len({row.micro_batches for row in rows}) == len(rows)
    assert {staged.model for staged in STAGED} == {"gpt_16_5b", "gpt_36_4096"}
    for staged in STAGED:
        assert staged.times(Results(table3()), "megatron").keys() == {1, 2, 4}


def test_the_latest_of_two_records_counts() -> None:
    values = sweep_points("fig7")[0].values()
    rows = Results([record(values, reason="old"), record(values, reason="new")]).rows("fig7")
    assert rows[0].record and rows[0].record.reason == "new"
    assert rows[1].record is None and not rows[1].ok
    with pytest.raises(ValueError, match="has not been run"):
        _ = rows[1].step_s


def test_without_records_nothing_is_claimed() -> None:
    verdict_of = said([])
    assert {name for name, one in verdict_of.items() if one == "holds"} == {CUBES}
    assert {name for name, one in verdict_of.items() if one == "by tests"} == set(TESTS) - set(CLAIMS)
    assert "does not hold" not in verdict_of.values()
    assert list(verdict_of) == [claim.id for claim in claims("autoddl")]


def test_figures_as_the_paper_has_them_keep_its_claims() -> None:
    verdict_of = said(as_published())
    assert {name for name, one in verdict_of.items() if one == "holds"} == set(CLAIMS)


def test_the_volume_of_cubes_is_bounded_and_has_the_paper_s_slope_but_for_its_own_share() -> None:
    sends, holds = cube_volume.volumes(), cube_volume.memories()
    for side, p in ((2, 8), (4, 64), (8, 512), (16, 4096)):
        buffer = 4 * cube_volume.WIDTH**2 / side**2
        assert (sends[p], holds[p]) == (6 * (side - 1) / side * buffer, 2 * buffer)
    assert cube_volume.slope({8: 4.0, 64: 1.0, 512: 0.25}) == pytest.approx(-2 / 3)
    (verdict,) = [one for one in verdicts(Results([])) if one.id == CUBES]
    assert verdict.simulated == (
        "over 8, 64, 512, 4096 devices volume / (n^2/p^(2/3)) differs by a factor 1.875, memory by 1.000; log-log "
        "slopes: memory -0.667, volume / ((k-1)/k) -0.667, volume as it is -0.569"
    )
    assert (verdict.says, verdict.published) == ("holds", "Theta(n^2/p^(2/3))") and "exact in" in verdict.reason


def test_a_volume_of_another_order_is_not_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's, n^2 / p^(1/2)."""
    monkeypatch.setattr(cube_volume, "volumes", lambda: {p: 1e9 / p**0.5 for p in (8, 64, 512, 4096)})
    (verdict,) = [one for one in verdicts(Results([])) if one.id == CUBES]
    assert verdict.says == "does not hold" and "differs by a factor 2.828" in verdict.simulated


@pytest.mark.parametrize(
    ("claim", "keep", "changes"),
    [
        ("AD-1", lambda v: "planner.max_replicas" in v, {"plan": plan(**dict.fromkeys(fig3_fig4.ATTENTION, (4, 2,
        8)))}), ("AD-2", lambda v: v.get("mode") == "calibrate",
         {"metrics": {"weights": "plain", "r2_large": {"plain": 0.89}}}),
        ("AD-3", lambda v: v.get("planner.strategies") == "[*\\:2x1x1]",
         {"metrics": {"step_time_s": 99.0, "collective_s": 99.0}}),
        ("AD-6", lambda v: v.get("planner.search") == "metropolis_hastings",
         {"predicted": {"communication_s": 1.2, "history": [[1, 1.2]], "elapsed_s": [0.1]}}),
        ("AD-6", lambda v: v.get("planner.search") == "coordinate_descent",
         {"predicted": {"communication_s": 1.0, "history": [[1, 1.0]], "elapsed_s": [99.0]}}),
        ("AD-7", lambda v: v.get("planner.paths") == "mixed" and v.get("cluster.nodes") == "32" and v["mode"] == "plan",
         {"plan": plan(**dict.fromkeys(DENSE, (2, 4, 4)))}),
        ("AD-8", lambda v: v.get("cluster.nodes") == "64" and v["planner"] == "megatron" and v["model"] == "vgg13",
         {"metrics": {"step_time_s": 1.05}}),
        ("AD-9", lambda v: v.get("cluster.nodes") == "256" and v["planner"] == "summa",
         {"metrics": {"step_time_s": 0.5}}),
        ("AD-10", lambda v: v.get("cluster.devices") == "8" and v["planner"] == "megatron",
         {"metrics": {"step_time_s": 3.0}}),
        ("AD-11", lambda v: v.get("model") == "gpt_24_1024" and v["planner"] == "autoddl",
         {"plan": plan(a=(2, 8, 1, 2, 1, 1))}),
        ("AD-12", lambda v: v.get("mesh.pipeline") == "4" and v["planner"] == "autoddl",
         {"metrics": {"step_time_s": 0.1}}),
    ],
)  # fmt: skip
def test_a_claim_that_does_not_hold_is_reported(
    claim: str, keep: Callable[[dict[str, str]], bool], changes: dict[str, Any]
) -> None:
    verdict_of = said(changed(as_published(), keep, **changes))
    assert verdict_of[claim] == "does not hold"


def test_the_largest_micro_batches_count_and_the_fastest_are_next_to_them() -> None:
    """In Table 3 it is the smallest."""
    setting = TRANSFORMERS[0]
    slower = changed(simulated("fig9"), lambda v: v.get("batch.micro_batches") == "4", metrics={"step_time_s": 50.0})
    results = Results(slower)
    rows = setting.rows(results, "Megatron-like")
    for row, micro_batches in (
        (setting.chosen(results, "Megatron-like"), 4),
        (setting.chosen(results, "Megatron-like", fastest), 8),
        (smallest(rows), 256),
    ):
        assert row and row.micro_batches == micro_batches
    shown = next(one for one in tables.sections(results) if one.title == "Fig. 9: Transformers on Piz Daint")
    lines = [row for row in shown.rows if row[1:5] == ("Megatron-like", "4", "550.0 ms", "50.0 s")]
    assert [line[5] for line in lines] == ["1.1 s (8)"] * 3


def test_both_protocols_are_judged_and_the_paper_s_counts() -> None:
    """With the largest micro-batches SUMMA beats Megatron at 64 nodes, with the fastest it does not."""
    slower = changed(
        as_published(),
        lambda v: v.get("batch.micro_batches") == "4" and v["planner"] == "megatron",
        metrics={"step_time_s": 50.0},
    )
    (verdict,) = [one for one in verdicts(Results(slower)) if one.id == "AD-9"]
    assert verdict.says == "does not hold"
    assert "the largest micro-batches: saved" in verdict.simulated
    assert "The fastest ones (holds): saved" in verdict.simulated


def test_searches_without_times_say_what_makes_them() -> None:
    old = [replace(one, predicted={"communication_s": 1.0, "history": [[1, 1.0]], "evaluations": 1}) for one in fig8()]
    (verdict,) = [one for one in verdicts(Results(old)) if one.id == "AD-6"]
    assert verdict.says == "not run" and "python run.py -m +sweeps=autoddl_fig8" in verdict.reason
    assert all(row[-2:] == ("-", "-") for row in tables.sections(Results(old))[0].rows)


def test_every_changed_check_has_its_verdict() -> None:
    changed_ids = ["AD-5", "AD-6", "AD-8", "AD-9", "AD-10", "AD-11", "AD-12"]
    shown = tables.sections(Results(as_published()))[-1]
    assert [row[0] for row in shown.rows] == changed_ids
    assert shown.rows[0][-1] == "holds"
    assert [row[0] for row in tables.sections(Results([]))[-1].rows] == ["AD-5"], "the others have not been run"


def test_stages_that_were_not_run_are_empty_cells_and_no_verdict() -> None:
    some = [one for one in table3() if "mesh.pipeline=1" in one.manifest["overrides"]]
    (verdict,) = [one for one in verdicts(Results(some)) if one.id == "AD-12"]
    count, every = len(table3()) - len(some), len(table3())
    assert verdict.says == "not run"
    assert verdict.reason == f"{count} of {every} points were not run: python run.py -m +sweeps=autoddl_table3"
    (section,) = [one for one in tables.sections(Results(some)) if one.title.startswith("Table 3")]
    assert section.rows[0][2] != "-" and section.rows[0][3:5] == ("-", "-")


def test_every_claim_of_which_a_part_was_run_says_what_makes_the_rest() -> None:
    """One point is left out of each sweep."""
    made = {"fig3": fig3(), "table2": table2(), "fig4": fig4(), "fig7": fig7(), "fig8": fig8()[1:],
            "fig9": simulated("fig9"), "fig10": simulated("fig10"), "table3": table3()}  # fmt: skip
    partly = Results(one for own in made.values() for one in own[1:-1])
    verdict_of = {one.id: one for one in verdicts(partly) if one.id in CLAIMS and one.says == "not run"}
    assert {*verdict_of} >= {*CLAIMS} - {CUBES, "AD-8", "AD-9", "AD-10", "AD-11"}
    for one in verdict_of.values():
        assert " points were not run: python run.py -m +sweeps=autoddl_" in one.reason, one
    assert "# 2 of 3 points" in partly.missing() and "# 2 of 16 points" in partly.missing()


def test_what_a_claim_compares_has_to_fit() -> None:
    none = changed(simulated("fig9"), lambda v: v["planner"] == "megatron", status="infeasible", reason="needs")
    (verdict,) = [one for one in verdicts(Results(none)) if one.id == "AD-8"]
    assert (verdict.says, verdict.reason.partition(" (")[0]) == ("not run", "does not fit: Megatron-like")
    (verdict,) = [one for one in verdicts(Results(replace(one, status="infeasible") for one in table3()))
               if one.id == "AD-12"]  # fmt: skip
    assert verdict.reason == "Transformer Wide, 64 nodes does not fit, with any number of stages"


def test_kendalls_tau() -> None:
    def ranked(measured: list[float]) -> list[fig3_fig4.Ranked]:
        return [fig3_fig4.Ranked(str(n), float(n), one) for n, one in enumerate(measured)]

    assert fig3_fig4.tau(ranked([1, 2, 3, 4])) == 1.0
    assert fig3_fig4.tau(ranked([4, 3, 2, 1])) == -1.0
    assert fig3_fig4.tau(ranked([2, 1, 3, 4])) == pytest.approx(4 / 6)
    equal = [fig3_fig4.Ranked("a", 1.0, 2.0), fig3_fig4.Ranked("b", 1.0, 1.0), fig3_fig4.Ranked("c", 2.0, 3.0)]
    assert fig3_fig4.tau(equal) == 1.0, "what is predicted to be equal has no order"
    assert fig3_fig4.apart(ranked([1, 2, 3, 4])) == 0.0
    assert fig3_fig4.apart(ranked([1, 4, 2, 3])) == pytest.approx(2 / 3), (
        "the prediction is 1 for the second, 3 for the last one"
    )


def test_a_curve_is_the_best_so_far() -> None:
    curve = Curve(((3, 4.0), (10, 2.0), (50, 1.0)))
    assert [curve.at(plans) for plans in (1, 3, 9, 10, 1000)] == [float("inf"), 4.0, 4.0, 2.0, 1.0]


@pytest.mark.parametrize("test", sorted({test for own in TESTS.values() for test in own}))
def test_the_tests_that_prove_a_claim_exist(test: str) -> None:
    file, _, name = test.partition("::")
    assert f"def {name}(" in (ROOT / file).read_text()


def test_only_what_was_run_has_a_table() -> None:
    shown = tables.sections(Results(fig7()))
    assert [section.title.partition(":")[0] for section in shown] == ["Fig. 7", "Claims", "Changed checks"]
    missing = Results(fig7()).missing()
    assert "autoddl_fig7" not in missing and "autoddl_fig9" in missing
    assert Results(as_published()).missing() == ""


def test_published_figures_are_next_to_ours() -> None:
    rows = [row for section in tables.sections(Results(as_published())) for row in section.rows]
    for saved in (("18 %", "8.8 %"), ("46.4 %", "36.1 %"), ("84.7 %", "71.5 %")):
        assert any(row[-2:] == saved for row in rows), saved
    (shown,) = [section for section in tables.sections(Results(as_published())) if section.title.startswith("Fig. 10")]
    assert "The paper, of 0.35B, 2 x 16 GPUs: AutoDDL selects plain data parallelism." in shown.notes
    assert ("Transformer Wide, 64 nodes", "AutoDDL", *2 * ("630.0 ms", "1.3 s", "1.3 s"), "335 s", "1") in rows
    assert ("Megatron", "(4, 16, 1)", "(4, 1, 16)", "3.75", "3.75") in rows


def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page_of = replace(PAGE, path=tmp_path / "results.md", figures={})
    for number, one in enumerate(as_published()):
        (tmp_path / "runs" / str(number)).mkdir(parents=True)
        one.save(tmp_path / "runs" / str(number) / "record.json")
    assert paper_cli.main(page_of, [str(tmp_path / "runs"), "--write"]) == 0
    printed = capsys.readouterr().out
    assert "12 claims: 1 holds" in printed and "AD-12" in printed
    page = (tmp_path / "results.md").read_text()
    assert page.startswith("# AutoDDL: paper, planned, simulated, measured\n")
    assert paper_cli.main(page_of, [str(tmp_path / "missing")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_a_row_knows_its_point() -> None:
    row = Row({"a": "1"}, None)
    assert (row["a"], row["b"], row.micro_batches) == ("1", "", 1)
    assert fig9_fig10.OURS in SCHEMES


def test_table_1_checks_the_methods_that_we_have() -> None:
    by_title = {section.title: section for section in tables.sections(Results(as_published()))}
    rows = {row[0]: row[1:] for row in by_title["Table 1: methods"].rows}
    assert rows["Data Parallel [25]"][:4] == ("Models fit in memory", "No Guarantee", "N/A", "Easy")
    assert rows["Data Parallel [25]"][4:] == ("6 of 10", "4.00 to 4.00"), "four Transformers do not fit"
    assert rows["AutoDDL"][4:] == ("10 of 10", "1.00 to 1.00")
    assert rows["Flexflow [19]"][4:] == rows["Alpa [44]"][4:] == ("-", "-")
    some = Results(one for one in as_published() if "model=gpt_28_4096" not in one.manifest["overrides"])
    assert table1.fits(some, "SUMMA") == (9, 9) and table1.sends(Results([]), "SUMMA") is None


def test_table_2_has_the_paper_s_costs_next_to_each_collective_s_fit() -> None:
    every = {"weights": "plain", "r2_large": {"plain": 0.7, "all_reduce": 0.99, "all_to_all": 0.95}}
    results = Results(replace(one, metrics=one.metrics | every) for one in table2())
    by_title = {section.title.partition(",")[0]: section for section in tables.sections(results)}
    rows = by_title["Table 2: costs of collectives"].rows
    assert ("2", "all_reduce", "2*(p-1)*alpha + 2*(p-1)/p*n*beta", "0.990") in rows
    assert [row[1] for row in rows if row[0] == "2"] == ["all_reduce", "all_to_all"]
