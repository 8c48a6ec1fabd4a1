"""The report on Myelin's tables and figures: which record is which point, and what becomes of each claim."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis import paper_cli
from analysis.myelin import ablation, quantities, tables
from analysis.myelin.claim_checks import CLAIMS, verdicts
from analysis.myelin.page import PAGE
from analysis.myelin.sweep_results import DEEPSPEED, MEGATRON, MYELIN, SWEEPS, Results, Row
from analysis.paper_data import claims
from analysis.run_artifacts import ORIGIN
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.record import RunRecord
from harness.core.trace import Span, Trace
from tests.analysis.myelin.published import PHI, Change, mesh_of, records


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a run: a profile, losses, and a trace with two micro-batches in flight."""
    folder = tmp_path_factory.mktemp("run")
    ModelProfile((LayerProfile(param_bytes=4 * PHI),)).save(folder / "profile.json")
    (folder / "metrics.jsonl").write_text('{"step": 0, "loss": 3.5}\n{"step": 1, "loss": 3.0}\n')
    tasks = [Span(name, 0, "compute", at, at + 1.0) for at, name in enumerate(("0F0", "0F1", "0B0", "0B1"))]
    Trace(tuple(tasks), ((0.0, 4.0),)).save(folder / "trace.json.gz")
    return folder


@pytest.fixture(scope="module")
def paper(run: Path) -> Results:
    return Results(records(run))


def said(results: Results) -> dict[str, str]:
    return {one.id: one.says for one in verdicts(results)}


def test_claims_hold_for_figures_like_the_papers(paper: Results) -> None:
    verdict_of = {one.id: (one.says, one.simulated) for one in verdicts(paper)}
    assert {name: says for name, (says, _) in verdict_of.items()} == dict.fromkeys(CLAIMS, "holds"), verdict_of
    assert {claim.id for claim in claims("myelin")} == {*CLAIMS}


def test_nothing_is_said_of_what_was_not_run() -> None:
    found = said(Results([]))
    assert set(found.values()) == {"not run"}, "tests prove a part of some, which is no verdict"


def slower(when: Callable[[Row], bool], factor: float) -> Change:
    return lambda row, metrics: metrics | {"step_time_s": metrics["step_time_s"] * (factor if when(row) else 1)}


def of(framework: str, size: str) -> Callable[[Row], bool]:
    return lambda row: (row.framework, row.size) == (framework, size)


def tuned(when: Callable[[Row], bool], **degrees: int) -> Change:
    return lambda row, metrics: metrics | ({"tuned": metrics["tuned"] | degrees} if when(row) else {})


def phase(name: str, when: Callable[[Row], bool], factor: float) -> Change:
    def change(row: Row, metrics: dict[str, Any]) -> dict[str, Any]:
        if not when(row):
            return metrics
        phases = metrics["phases_s"]
        more = (factor - 1) * phases[name]
        return metrics | {
            "phases_s": phases | {name: phases[name] + more},
            "step_time_s": metrics["step_time_s"] + more,
        }

    return change


@pytest.mark.parametrize(
    ("claim", "sweep", "change"),
    [
        ("MY-2", "fig5", phase("pipelining", lambda row: mesh_of(row)["pipeline"] == 12, 2.0)),
        ("MY-2", "fig5", phase("pipelining", lambda row: mesh_of(row)["pipeline"] == 6, 0.7)),
        ("MY-3", "fig6", lambda row, m: m | {"peaks": [{"contents": m["peaks"][0]["contents"] | {"gradients": 1}}]}),
        ("MY-3", "fig6", lambda row, m: m | {"peaks": [{"contents": m["peaks"][0]["contents"] | {"buckets": 16}}]}),
        ("MY-4", "fig6", lambda row, m: m | {"peak_memory_bytes": [1]}),
        ("MY-5", "fig6", phase("data_parallel", lambda row: mesh_of(row)["pipeline"] == 6, 0.8)),
        ("MY-5", "fig6", phase("pipelining", lambda row: mesh_of(row)["pipeline"] == 6, 1.3)),
        ("MY-6", "fig8", phase("optimizer", lambda row: row["engine.k"] == "1", 0.5)),
        ("MY-6", "fig8", phase("optimizer", lambda row: row["engine.k"] == "16", 3.0)),
        ("MY-7", "table2", tuned(of(MYELIN, "12B"), data=4)),
        ("MY-7", "table2", tuned(of(MEGATRON, "24B"), data=8)),
        ("MY-8", "table2", slower(of(DEEPSPEED, "24B"), 0.7)),
        ("MY-8", "table2", slower(of(MEGATRON, "50B"), 0.5)),
        ("MY-9", "fig10", slower(lambda row: row.framework == DEEPSPEED, 0.7)),
        ("MY-10", "fig10", slower(of(MYELIN, "100B"), 1.25)),
        ("MY-10", "fig10", slower(of(MEGATRON, "100B"), 2.0)),
        ("MY-11", "fig11", slower(lambda row: row.framework == DEEPSPEED, 0.7)),
        ("MY-11", "fig11", slower(lambda row: row.framework == MYELIN and row["mesh.data"] == "8", 0.8)),
    ],
)  # fmt: skip
def test_each_claim_can_fail(run: Path, claim: str, sweep: str, change: Change) -> None:
    assert said(Results(records(run, sweeps=(sweep,))))[claim] == "holds"
    assert said(Results(records(run, change, (sweep,))))[claim] == "does not hold"


def test_losses_that_part_and_too_many_in_flight_are_seen(run: Path, tmp_path: Path) -> None:
    """One grid's run has files of its own."""
    for name in ("metrics.jsonl", "trace.json.gz"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    text = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(text.replace("3.0}", "3.00000001}"))
    tasks = [Span(f"0F{i}", 0, "compute", i, i + 1.0) for i in range(5)] + [Span("0B0", 0, "compute", 5.0, 6.0)]
    Trace(tuple(tasks), ((0.0, 6.0),)).save(tmp_path / "trace.json.gz")
    made = records(run, sweeps=("fig9", "fig10"))
    assert said(Results(made))["MY-1"] == said(Results(made))["MY-12"] == "holds"
    changed = [
        replace(one, manifest=one.manifest | {ORIGIN: str(tmp_path)})
        if "mesh.pipeline=4" in one.manifest["overrides"]
        else one
        for one in made
    ]
    found = {one.id: (one.says, one.measured) for one in verdicts(Results(changed))}
    assert found["MY-1"][0] == found["MY-12"][0] == "does not hold"
    assert (
        "GPT (4, 64) on 3 grids at most 3.3e-09 of the loss apart" in found["MY-1"][1] and "5 of 4" in found["MY-12"][1]
    )


def test_the_first_steps_of_a_deep_model_count_however_far_rounding_parts_it(run: Path, tmp_path: Path) -> None:
    """A second run on one device parts as far from the first one, and does not excuse a grid in the first 100 steps."""

    def losses(name: str, parted: int) -> Path:
        """Of 120 steps, other ones from a step on."""
        folder = tmp_path / name
        folder.mkdir()
        found = ({"step": step, "loss": 3.0 + 0.001 * (step >= parted)} for step in range(120))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in found))
        (folder / "trace.json.gz").write_bytes((run / "trace.json.gz").read_bytes())
        return folder

    same, early, late = losses("same", 120), losses("early", 99), losses("late", 100)

    def verdict(deep: bool, grid: Path, again: Path) -> str:
        """Of losses of a grid and of the second run; the other model's are the same everywhere."""

        def origin(overrides: list[str]) -> Path:
            if ("model.layers=12" in overrides) != deep:
                return same
            return grid if "engine=myelin" in overrides else again if "batch.micro_batches=16" in overrides else same

        return said(Results([
            replace(one, manifest=one.manifest | {ORIGIN: str(origin(one.manifest["overrides"]))})
            for one in records(run, sweeps=("fig9",))
        ]))["MY-1"]  # fmt: skip

    assert verdict(True, late, late) == verdict(True, late, same) == "holds"
    assert verdict(True, early, early) == "does not hold"
    assert verdict(False, late, same) == "does not hold", "a small model does not magnify rounding: all its steps count"


def test_in_float16_rounding_is_what_another_serial_run_shows(run: Path, tmp_path: Path) -> None:
    """A grid may be twice as far from the first run on one rank as the second one, which adds in another order."""

    def losses(name: str, change: float) -> Path:
        (tmp_path / name).mkdir()
        for one in run.iterdir():
            (tmp_path / name / one.name).write_bytes(one.read_bytes())
        text = (run / "metrics.jsonl").read_text()
        (tmp_path / name / "metrics.jsonl").write_text(text.replace("3.0}", f"{3.0 + change}}}"))
        return tmp_path / name

    again, near, far = losses("again", 1e-3), losses("near", 1.9e-3), losses("far", 2.1e-3)

    def verdict(grid: Path) -> str:
        def origin(overrides: list[str]) -> Path:
            if "precision=fp16" not in overrides or "batch.micro_batches=4" not in overrides:
                return again if {"precision=fp16", "batch.micro_batches=16"} <= {*overrides} else run
            return grid

        return said(Results([
            replace(one, manifest=one.manifest | {ORIGIN: str(origin(one.manifest["overrides"]))})
            for one in records(run, sweeps=("fig9",))
        ]))["MY-1"]  # fmt: skip

    assert verdict(near) == "holds"
    assert verdict(far) == "does not hold"


def test_a_few_points_are_no_verdict(run: Path) -> None:
    made = records(run, sweeps=("fig5", "fig10"))
    found = {one.id: one for one in verdicts(Results(made[1:-1]))}
    assert found["MY-2"].says == "not run"
    assert found["MY-2"].reason == ("1 of 4 points were not run: python run.py -m +sweeps=myelin_fig5 scale=paper")
    some = [one for one in made if "cluster.nodes=64" not in one.manifest["overrides"]]
    assert said(Results(some))["MY-8"] == "not run"
    assert "    python run.py -m +sweeps=myelin_fig10 scale=paper   # 3 of 12 points\n" in Results(some).missing()


def test_formulas_of_the_paper(run: Path) -> None:
    """F of the 12B model at a batch of 16384 is 8.1345e17 FLOPs; 49.4 % of 48 peaks are 113.6 days."""
    row = Results(records(run, sweeps=("fig10",))).good("fig10")[0]
    assert (row.size, row.framework, row.mesh.size) == ("12B", MYELIN, 48)
    assert quantities.flops(row) == pytest.approx(8.1345e17, rel=1e-4)
    assert row.record is not None
    seconds = 8.1345e17 / (0.494 * 48 * 125e12)
    timed = Row(row.values, replace(row.record, metrics=row.metrics | {"step_time_s": seconds}))
    assert quantities.percent_of_peak(timed) == pytest.approx(49.4, rel=1e-3)
    assert quantities.days(timed) == pytest.approx(113.6, rel=1e-3)


def test_each_variant_of_the_ablation_has_its_points(run: Path) -> None:
    def change(row: Row, metrics: dict[str, Any]) -> dict[str, Any]:
        seconds = 1.0 + 10 * float(row["jitter"] or 0)
        seconds += 100 * (row["engine.order"] == "1f1b") + 1000 * (row["cluster.blocking_messages"] == "true")
        return metrics | {"phases_s": {"pipelining": seconds}, "step_time_s": seconds}

    results = Results(records(run, change, ("ablation",)))
    assert ablation.variant_s(results, ablation.BASE, "none", "0") == 1.0
    assert ablation.variant_s(results, "1F1B", "the head's", "0.3") == pytest.approx(104.0)
    assert ablation.variant_s(results, "blocking, 1F1B", "a slow stage", "0") == 1101.0
    assert ablation.mechanism_s(results, ablation.MECHANISMS[2], "1f1b", True) == 1101.0
    orders, mechanisms = ablation.sections(results)
    assert not any("-" in row for row in (*orders.rows, *mechanisms.rows)), "every cell has its points"
    assert ablation.sections(Results([])) == []


def test_every_sweep_is_shown(paper: Results) -> None:
    """At both scales; Table I has both in one table."""
    shown = [section.title for section in tables.sections(paper)]
    small = [title for title in shown if "in small" in title]
    names = {"table1": "Table I:", "table2": "Table II", "ablation": "What brings what"}
    for sweep in SWEEPS:
        name = names.get(sweep, sweep.replace("fig", "Fig. "))
        assert any(title.startswith(name) for title in set(shown) - set(small)), sweep
        if sweep != "table1":
            local = {"ablation": "Orders and policies"}.get(sweep, name)
            assert any(title.startswith(local) for title in small), sweep


def test_the_validation_at_the_papers_scale_is_what_it_costs(paper: Results) -> None:
    by_title = {section.title.partition(":")[0]: section for section in tables.sections(paper)}
    assert [row[:3] for row in by_title["Fig. 9"].rows] == [("1", "single", "1 x 1"), ("12", "myelin", "2 x 6")]
    assert "with G_inter = 2. The batch, 96 here" in by_title["Fig. 9"].notes[0]


def test_what_was_tuned_for_this_machine(run: Path) -> None:
    def change(row: Row, metrics: dict[str, Any]) -> dict[str, Any]:
        tuned = metrics["tuned"] | {"simulated": 10, "candidates": 15, "closed_form_step_time_s": 0.48}
        return metrics | {"tuned": tuned, "step_time_s": 0.5}

    found = tables.sections(Results(records(run, change, ("table2",))))
    (small,) = [section for section in found if section.title.startswith("Table II, in small")]
    assert small.rows[0][:5] == ("Myelin", "8 / 1 / 6 / 8", "10 of 15", "500", "0.96")
    assert "For 4 ranks of the local machine" in small.notes[1]


def test_the_page(tmp_path: Path, paper: Results) -> None:
    by_title = {section.title.partition(":")[0]: section for section in tables.sections(paper)}
    assert by_title["Fig. 10"].rows[1][4:8] == ("132.5", "135.0", "42.4", "41.6")
    assert by_title["Fig. 11"].rows[0][4] == "113.9" and by_title["Table I"].rows[0][4] == "12"
    assert by_title["Fig. 8"].rows[0][:2] == ("no overlap", "6.05") and by_title["Fig. 8"].rows[1][1] == "6.50"
    assert paper.missing() == ""
    RunRecord("of another sweep", "ok", "simulated").save(tmp_path / "runs" / "record.json")
    assert paper_cli.main(replace(PAGE, path=tmp_path / "myelin.md"), [str(tmp_path), "--write"]) == 0
    assert "MY-12" in (tmp_path / "myelin.md").read_text()


@pytest.mark.parametrize("cut", [False, True])
def test_files_that_are_not_there_or_cut_off_are_named_and_their_cells_empty(
    run: Path, tmp_path: Path, cut: bool
) -> None:
    """Of one grid's run; the page is complete otherwise."""
    if cut:
        for name in ("metrics.jsonl", "trace.json.gz", "profile.json"):
            (tmp_path / name).write_bytes((run / name).read_bytes()[:-8])

    def moved(one: RunRecord) -> bool:
        return "mesh.pipeline=4" in one.manifest["overrides"] or "model=gpt_24b" in one.manifest["overrides"]

    found = Results(
        replace(one, manifest=one.manifest | {ORIGIN: str(tmp_path)}) if moved(one) else one
        for one in records(run, sweeps=("fig9", "table1", "fig10"))
    )
    by_title = {section.title.partition(":")[0]: section for section in tables.sections(found)}
    small, counted = by_title["Fig. 9, measured in small"], by_title["Table I"]
    assert [row[4:] for row in small.rows if row[1] == "4 x 1"] == [("-", "-", "-", "-", "-")]
    assert not any("-" in row for row in small.rows if row[1] == "2 x 2"), "others have theirs"
    assert [row[5:] for row in counted.rows if row[0] == "24B"] == [("-", "-")]
    for section, files in ((small, ("metrics.jsonl", "trace.json.gz")), (counted, ("profile.json",))):
        verdict = [note for note in section.notes if note.startswith("Cells are empty for 1 unreadable file: ")]
        assert [str(tmp_path / name) in note for name, note in zip(files, verdict, strict=True)] == [True] * len(files)
    verdict_of_it = {one.id: one for one in verdicts(found)}
    assert verdict_of_it["MY-1"].says == verdict_of_it["MY-12"].says == "not run"
    assert str(tmp_path / "metrics.jsonl") in verdict_of_it["MY-1"].reason
    figure = PAGE.figures["myelin_fig9"](found)
    assert figure and len(figure.axes[0].get_lines()) == 3, "one run of four has no losses"


def test_runs_of_other_lengths_have_no_difference(run: Path, tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "trace.json.gz"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 3.5}\n')
    found = Results(
        replace(one, manifest=one.manifest | {ORIGIN: str(tmp_path)})
        if "mesh.pipeline=4" in one.manifest["overrides"] else one
        for one in records(run, sweeps=("fig9",))
    )  # fmt: skip
    (verdict,) = [one for one in verdicts(found) if one.id == "MY-1"]
    assert (verdict.says, verdict.reason.partition(";")[0]) == (
        "not run", f"{tmp_path} has losses of 1 steps, {run} of 2"
    )  # fmt: skip
