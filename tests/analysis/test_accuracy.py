"""The accuracy ledger, on records that are made up and on those that are committed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from analysis import accuracy, records
from analysis.accuracy import COMMITTED, Case
from harness.core.record import RunRecord

MEDIAN_ERRORS = {
    "ddp": 0.06, "deepspeed": 0.08, "fsdp": 0.11, "gpipe": 0.12, "myelin": 0.16, "periodic": 0.12, "pipeline": 0.06,
    "sbp": 0.13, "single": 0.09, "torch_pipelining": 0.1, "torchgpipe": 0.01,
}  # fmt: skip
"""Of step times, by engine, at most. With ten races came the first record of pipeline, and six of periodic, which had
one."""
MEMORY_ERRORS = {
    "ddp": 0.028, "deepspeed": 0.043, "fsdp": 0.036, "gpipe": 0.054, "myelin": 0.023, "periodic": 0.042,
    "pipeline": 0.047, "sbp": 0.054, "single": 0.025, "torch_pipelining": 0.033,
}  # fmt: skip
"""Of the memory of the device that is furthest off, likewise; torchgpipe's is not metered."""
TAUS = {"amoebanet": 0.88, "gpt": 0.7, "mlp": 0.77, "resnet": 0.88, "unet": 0.85}
"""Kendall's tau of the predicted order in the two races of each model, at least."""


def record(number: int, engine: str, measured_s: float, predicted_s: float, **config: Any) -> RunRecord:
    ratios = {"step_time_s": predicted_s / measured_s, "peak_memory_bytes": [0.9, None]}
    keys = {"engine": {"name": engine}, "model": {"name": "mlp"}, "batch": {"size": 8}, "out": f"runs/a/{number}"}
    metrics = {"step_time_s": measured_s, "predicted_over_measured": ratios}
    made = RunRecord(str(number), "ok", config=keys | config, metrics=metrics)
    return replace(made, manifest={"overrides": [f"engine={engine}", f"seed={number}"]})


def test_cases_are_measured_runs_that_were_predicted() -> None:
    one = record(1, "gpipe", 1.0, 0.8)
    failed, simulated = (
        replace(record(2, "ddp", 1, 1), status="oom"),
        replace(record(3, "fsdp", 1, 1), source="simulated"),
    )
    (case,) = accuracy.cases([one, failed, simulated])
    assert (case.engine, case.ratio, case.memory_error) == ("gpipe", 0.8, pytest.approx(0.1))


def test_every_record_is_a_case_or_left_out_with_its_reason() -> None:
    one = record(1, "gpipe", 1.0, 0.8)
    others = [
        replace(record(2, "ddp", 1, 1), status="oom"),
        replace(record(3, "fsdp", 1, 1), source="simulated"),
        replace(record(4, "sbp", 1, 1), metrics={}),
        replace(record(1, "gpipe", 2.0, 0.8), id="older"),
        record(5, "delayed", 1, 1),
        replace(busy := record(6, "ddp", 1, 1), metrics=busy.metrics | {"slowed": 1.3}),
    ]
    found = accuracy.ledger([others[3], one, *others[:3], *others[4:]])
    assert [case.id for case in found.cases] == ["1"]
    assert {left.id: left.why for left in found.left_out} == {
        "2": "oom, not measured to its end",
        "3": "simulated, not measured",
        "4": "has no measured step time",
        "older": "there is a newer run of its point",
        "5": "engine=delayed stands in for another engine, on one device",
        "6": "the machine was busy with other things",
    }
    assert accuracy.sources(found)[0] == "0 of 1 predictions are of today's simulator"


def test_a_sweep_over_engines_is_a_contest() -> None:
    """Two of three pairs are in the right order; the predicted best takes twice the time of the best."""
    loaded = [record(1, "single", 4.0, 4.0), record(2, "gpipe", 2.0, 3.0), record(3, "ddp", 4.0, 2.0)]
    loaded += [record(4, "gpipe", 1.0, 1.0, seed=1, model={"name": "unet"})]
    (contest,) = accuracy.contests(accuracy.cases(loaded))
    assert (contest.name, len(contest.cases), contest.regret) == ("a mlp", 3, 2.0)
    assert contest.tau == pytest.approx(0.0)


def test_a_group_has_its_median_its_worst_and_its_share() -> None:
    found = [Case(str(n), "gpipe", "mlp", "", 1.0, ratio, (), quick_s=0.8) for n, ratio in enumerate((0.95, 1.05, 0.5))]
    assert accuracy.by(found, lambda one: one.engine) == [
        ("gpipe", "3", "0.95", "1.19", "5%", "50%", "67%", "67%", "-", "-")
    ]


def test_runs_are_classed_by_the_length_of_their_steps() -> None:
    found = [Case(str(n), "gpipe", "mlp", "", step_s, step_s, ()) for n, step_s in enumerate((0.004, 0.05, 0.049))]
    assert [row[:2] for row in accuracy.by(found, accuracy.length)] == [
        ("5 to 50 ms", "1"), ("50 ms and more", "1"), ("below 5 ms", "1"),
    ]  # fmt: skip


@pytest.mark.usefixtures("computation")
def test_no_committed_figure_gets_worse(capsys: pytest.CaptureFixture[str]) -> None:
    """By records that come or go, and by a worse simulator where their packs have the profile."""
    found = accuracy.cases(records.load(sorted(COMMITTED.glob("*.jsonl.gz"))).records)
    rows = accuracy.by(found, lambda one: one.engine)
    medians = {row[0]: float(row[4].rstrip("%")) / 100 for row in rows}
    memory = {row[0]: float(row[8].rstrip("%")) / 100 for row in rows if row[8] != "-"}
    assert {*medians} == {*MEDIAN_ERRORS} and all(medians[name] <= most for name, most in MEDIAN_ERRORS.items())
    assert {*memory} == {*MEMORY_ERRORS} and all(memory[name] <= most for name, most in MEMORY_ERRORS.items())
    assert len(found) >= 201, "a record is removed with a reason alone"
    races = accuracy.cases(records.load([COMMITTED / "races.jsonl.gz"]).records)
    assert len(races) == 87
    for contest in accuracy.contests(races):
        assert contest.tau is not None and contest.tau >= TAUS[contest.cases[0].model], contest.name
        assert contest.regret <= 1.03, contest.name
    assert accuracy.main([]) == 0
    printed = capsys.readouterr().out
    assert "worst predictions" in printed and "schemes-local gpt" in printed
    assert f"of {len(found)} predictions are of today's simulator" in printed and "left out, " in printed


def test_sources_without_a_case(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert accuracy.main([str(tmp_path)]) == 2 and "no measured record" in capsys.readouterr().err
    assert accuracy.main([str(tmp_path / "no")]) == 2 and "does not exist" in capsys.readouterr().err
