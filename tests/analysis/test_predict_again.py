"""Predictions of measured runs by today's simulator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from analysis import accuracy, pack, predict_again, records
from analysis.predict_again import NotPredictable
from harness.cli.compose import compose
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.record import RunRecord
from harness.run import runner
from harness.simulator import op_durations

LAYER = LayerProfile("l", 1e-3, 2e-3, 1e9, 1e6, param_bytes=4000, output_bytes=10_000, saved_bytes=20_000)
PROFILE = ModelProfile((LAYER,) * 8, "net_8", 2, input_bytes=100, source="measured on X", times="measured")
FLAT = ("cluster=flat", "cluster.devices=4", "cluster.memory_gb=1", "cluster.bandwidth_gb_s=1", "costs=measured")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose measurements are as they were predicted."""
    folder = tmp_path_factory.mktemp("again")
    PROFILE.save(folder / "p.json")
    typed = [f"profile={folder / 'p.json'}", *FLAT, "mode=simulate", f"out={folder / 'run'}", "tracker=none"]
    record = runner.run(compose(typed), typed)
    ratios = {"step_time_s": 1.0, "peak_memory_bytes": [1.0] * 4}
    metrics = record.metrics | {"predicted_over_measured": ratios}
    replace(record, source="measured", metrics=metrics).save(folder / "run" / "record.json")
    return folder / "run"


def only(source: Path) -> RunRecord:
    (record,) = records.load([source]).records
    return record


@pytest.mark.usefixtures("computation")
def test_the_same_simulator_predicts_the_same_from_files_and_from_a_pack(ran: Path, tmp_path: Path) -> None:
    before = only(ran)
    found = predict_again.figures(before)
    packed, _ = pack.write(ran, tmp_path)
    for figure in ("step_time_s", "peak_memory_bytes"):
        assert found[figure] == before.predicted[figure] == predict_again.figures(only(packed))[figure]
    (case,) = accuracy.cases([only(packed)])
    assert (case.stored, case.predicted_s) == ("", found["step_time_s"]) and case.memory


def test_another_simulator_predicts_something_else(ran: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = accuracy.cases([only(ran)])[0]
    monkeypatch.setattr(op_durations.TaskCosts, "update_s", lambda self, size: 1.0)
    assert accuracy.cases([only(ran)])[0].predicted_s > 1.0 > before.predicted_s


def test_what_is_missing_is_the_reason(ran: Path, tmp_path: Path) -> None:
    record = only(ran)
    with pytest.raises(NotPredictable, match="does not say on which cluster"):
        predict_again.figures(replace(record, manifest={}))
    with pytest.raises(NotPredictable, match="is older than profiles in packs"):
        predict_again.figures(replace(record, manifest=record.manifest | {"origin": "gone.jsonl.gz"}))
    with pytest.raises(NotPredictable, match="No such file"):
        predict_again.figures(replace(record, manifest=record.manifest | {"origin": str(tmp_path)}))
    single = {"name": "single", "checkpoint": "never", "deferred_batch_norm": False, "threads": 1}
    wrong = record.config | {"engine": single}
    with pytest.raises(NotPredictable, match="refused today"):
        predict_again.figures(replace(record, config=wrong))
    unknown = record.config | {"engine": {**record.config["engine"], "gone": 1}}
    with pytest.raises(NotPredictable, match="gone"):
        predict_again.figures(replace(record, config=unknown))


@pytest.mark.usefixtures("computation")
def test_keys_that_came_after_a_run_have_their_defaults(ran: Path) -> None:
    record = only(ran)
    before = {key: part for key, part in record.config.items() if key != "jitter"}
    for group, key in (("optimizer", "nesterov"), ("engine", "checkpoint"), ("precision", "tf32"), ("cluster", "slow")):
        before[group] = {name: value for name, value in before[group].items() if name != key}
    assert predict_again.figures(replace(record, config=before)) == predict_again.figures(record)
