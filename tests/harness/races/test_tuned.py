"""tune.verify: which choices can race on this machine, and what the first one lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.core.problem import CannotRun, Problem
from harness.core.record import EXIT_CODES, RunRecord
from harness.planning.tune import candidate_table
from harness.planning.tune.result import Best, of_a_run
from harness.races import tuned
from harness.races.entries import Entry
from harness.races.result import Result
from harness.races.verdict import Place, Ratio
from harness.sweep import local
from harness.sweep.points import Point
from harness.sweep.row import Row

DDP = Best("ddp", 1, 2, 1, 4, 2, "never", 1.0, 16.0, None, None, 10, 100,
           ("mode=simulate", "engine=ddp", "model=mlp", "cluster=flat", "cluster.devices=2", "tracker=none",
            "mesh.data=2", "batch.micro_batches=2"))  # fmt: skip


def entry(name: str, step_s: float) -> Entry:
    return Entry(name, Row(Point.of([f"seed={len(name)}"])), rounds_s=[step_s] * 7)


def test_a_described_cluster_is_replaced_by_this_machine() -> None:
    own = ["engine=ddp", "model=mlp", "tracker=none", "mesh.data=2", "batch.micro_batches=2"]
    assert of_a_run(DDP.overrides) == own
    local = ("engine=ddp", "cluster.devices=2", "tune.verify=3", "race.minutes=1")
    assert of_a_run(local) == ["engine=ddp", "cluster.devices=2"]
    assert DDP.training == f"python run.py {' '.join(own)}" and not replace(DDP, overrides=local).training
    assert of_a_run(["cluster=flat", "steps=500", "cluster.nodes=2"]) == ["steps=500"]


def test_equal_plans_are_verified_once() -> None:
    same, slower = replace(DDP, overrides=(*DDP.overrides, "planner.by=memory")), replace(DDP, step_time_s=2.0)
    found = {"kinds": [DDP.to_json()], "rows": [one.to_json() for one in (same, DDP, slower)]}
    record = RunRecord("x", "ok", metrics={"tuned": found})
    assert [one.step_time_s for one in tuned._best([record], 3)] == [1.0, 2.0]
    other = replace(DDP, scheme="ddp planner=memory", overrides=(*DDP.overrides, "planner.by=memory"))
    found = {"kinds": [other.to_json(), DDP.to_json()], "rows": [slower.to_json()]}
    record = RunRecord("x", "ok", metrics={"tuned": found})
    assert [one.scheme for one in tuned._best([record], 2)] == ["ddp", "ddp"], "other planners have found the same plan"
    assert [one.step_time_s for one in tuned._best([record], 2)] == [1.0, 2.0]


def test_the_fastest_that_trains_is_named_where_the_fastest_is_simulated_only() -> None:
    best = (replace(DDP, scheme="deepspeed planner=megatron", step_time_s=0.9, simulated_only=True), DDP)
    found = [*candidate_table.winner(best)]
    assert found[:2] == ["the fastest: deepspeed planner=megatron, simulated only; run it:", best[0].command]
    assert found[2].startswith("ddp, trained on such a cluster") and found[3] == DDP.training
    assert found[4:] == ["the fastest that trains: ddp; run it:", DDP.command]
    assert [*candidate_table.winner(best[1:])][2:] == ["the fastest: ddp; run it:", DDP.command]
    assert [*candidate_table.winner(best[:1])] == found[:2]
    assert candidate_table.columns(best)[0].cells == ["deepspeed planner=megatron †", "ddp"]
    assert any("simulated only" in text for text in candidate_table.legend(best))


def test_schemes_that_predictions_cannot_part_are_named() -> None:
    near, slower = (
        replace(DDP, scheme=name, step_time_s=seconds) for name, seconds in (("fsdp", 1.04), ("gpipe", 1.06))
    )
    assert next(candidate_table.winner((DDP, near, slower))).endswith("(within 5 %): fsdp")
    assert not any("within" in line for line in candidate_table.winner((DDP, slower)))


def test_what_needs_more_devices_is_named_and_not_raced(tmp_path: Path) -> None:
    many = replace(DDP, overrides=(*DDP.overrides[:-2], "mesh.data=64", "batch.size=64", "batch.micro_batches=1"))
    lines: list[str] = []
    assert tuned.verified([many, many], tmp_path / "run", [], lines.append) == 0
    assert lines[1].startswith("1 ddp cannot run here: mesh.data 64 needs 64 devices")
    assert lines[-1] == "nothing to race: 0 of 2 can run on this machine"


def test_what_the_first_choice_lost_and_the_command_of_the_fastest(tmp_path: Path) -> None:
    one, two = entry("1 ddp", 0.3), entry("2 fsdp", 0.2)
    ratios = {"1 ddp": Ratio(1, 1, 1), "2 fsdp": Ratio(1.5, 1.4, 1.6)}
    result = Result([one, two], tmp_path, 1.0, 0.5, [one, two], ratios, {"1 ddp": Place(2), "2 fsdp": Place(1)})
    said, _, command = tuned._lost(result, {1: DDP, 2: replace(DDP, scheme="fsdp")})
    assert "the first choice, 1 ddp, takes 1.50 times the step time of the fastest, 2 fsdp" in said
    assert command == "python run.py engine=ddp model=mlp tracker=none mesh.data=2 batch.micro_batches=2"


@pytest.mark.parametrize("given", ["1", "-1", "x"])
def test_numbers_that_are_no_race_are_refused(given: str) -> None:
    with pytest.raises(CannotRun, match=r"tune\.verify"):
        tuned._verified([f"tune.verify={given}"])


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (Place(2), "verified: the first choice, 1 ddp, is the fastest of 2"),
        (Place(1), "2 fsdp may be as fast: the difference may be noise"),
        (Place(1, resolved=False), "2 fsdp may be as fast: not resolved"),
    ],
)
def test_what_shares_the_first_rank_is_said(second: Place, said: str, tmp_path: Path) -> None:
    both = [entry("1 ddp", 0.2), entry("2 fsdp", 0.21)]
    ratios = {"1 ddp": Ratio(1, 1, 1), "2 fsdp": Ratio(0.95, 0.8, 1.1)}
    result = Result(both, tmp_path, 1.0, 0.5, both, ratios, {"1 ddp": Place(1), "2 fsdp": second})
    assert said in next(tuned._lost(result, {1: DDP, 2: DDP}))


def test_what_is_feasible_is_verified_and_the_rest_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One engine of two has no plan, so the search ends with an error; the code stays that of the search."""
    two = {"kinds": [DDP.to_json()], "rows": [replace(DDP, scheme="fsdp", step_time_s=2.0).to_json()]}
    none = RunRecord("y", "infeasible", reason="does not fit", problems=[Problem("mesh.pipeline", 3, "has no plan")])
    points = [Point.of(["mode=tune", "tune.verify=3", f"engine={name}"]) for name in ("ddp", "gpipe")]
    rows = [Row(points[0], record=RunRecord("x", "ok", metrics={"tuned": two})), Row(points[1], record=none)]
    raced: list[int] = []
    monkeypatch.setattr(local, "rows_of", lambda overrides: rows)
    monkeypatch.setattr(local, "run_to_end", lambda rows, folder: 1)
    monkeypatch.setattr(tuned, "verified", lambda best, *rest: raced.append(len(best)) or 0)
    given = ["mode=tune", "engine=ddp,gpipe", "tune.verify=3", f"out={tmp_path}"]
    assert tuned.main(given) == 1 and raced == [2]
    assert "not verified: gpipe is infeasible: mesh.pipeline 3 has no plan" in capsys.readouterr().out
    monkeypatch.setattr(local, "run_to_end", lambda rows, folder: EXIT_CODES["preempted"])
    assert tuned.main(given) == EXIT_CODES["preempted"] and raced == [2]
