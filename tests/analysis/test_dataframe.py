"""Records as tidy frames."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pandas
import pytest

from analysis import dataframe, records
from harness.core.record import RunRecord


def record(number: int = 0, mode: str = "run", **changes: Any) -> RunRecord:
    config = {
        "mode": mode, "out": f"/somewhere/runs/sweep-local/{number}", "engine": {"name": "gpipe"},
        "planner": {"name": "balance"}, "model": {"name": "unet"}, "cluster": {"name": "local"},
        "precision": {"name": "fp32", "dtype": "float32"}, "batch": {"size": 16, "micro_batches": 8},
    }  # fmt: skip
    figures = {"step_time_s": 0.5, "utilization": [0.5, 0.75], "bubble_fraction": 0.375,
               "peak_memory_bytes": [100, 300], "bytes_sent": {"activations": 10, "skips": 5}}  # fmt: skip
    metrics = figures | {"throughput": 32.0, "first_loss": 0.75, "loss": 0.25}
    metrics |= {"predicted_over_measured": {"step_time_s": 0.8}}
    fields: dict[str, Any] = {
        "source": "measured" if mode == "run" else "simulated", "config": config,
        "plan": {"mesh": {"data": 2, "pipeline": 2, "tensor": 1}, "micro_batches": 8},
        "metrics": metrics if mode != "plan" else {},
        "predicted": figures | {"step_time_s": 0.4, "peak_memory_bytes": [110, 290]},
        "manifest": {"overrides": ["model=unet_5_64"], "start_time": "2026-01-01T12:00:00.000+00:00", "origin": "a/b"},
    }  # fmt: skip
    return RunRecord(**{"id": str(number), "status": "ok", **fields, **changes})


def test_a_row_a_run() -> None:
    (row,) = dataframe.runs([record()]).to_dict("records")
    assert row.pop("time") == pandas.Timestamp("2026-01-01T12:00:00Z")
    assert pandas.isna(row.pop("speed_over_single")), "there is no run with engine=single"
    assert row == {
        "sweep": "sweep-local", "point": "0", "id": "0", "status": "ok", "source": "measured", "engine": "gpipe",
        "planner": "balance", "model": "unet_5_64", "cluster": "local",
        "data_parallel_size": 2, "pipeline_parallel_size": 2, "tensor_parallel_size": 1,
        "devices": 4, "batch": 16, "micro_batches": 8, "micro_batch_size": 1, "precision": "float32",
        "throughput": 32.0, "step_time_s": 0.5, "first_loss": 0.75, "last_loss": 0.25, "utilization": 0.625,
        "bubble": 0.375, "peak_memory_bytes": 300, "predicted_step_time_s": 0.4,
        "predicted_peak_memory_bytes": 290, "predicted_over_measured": 0.8, "bytes_activations": 10, "bytes_skips": 5,
        "origin": "a/b",
    }  # fmt: skip


def test_speed_is_compared_with_single_in_the_same_sweep() -> None:
    def on_one_device(speed: float, mode: str = "run", folder: str = "/runs/a") -> RunRecord:
        found = record(mode=mode)
        config = found.config | {"engine": {"name": "single"}, "out": f"{folder}/{mode}"}
        return record(mode=mode, config=config, metrics=found.metrics | {"throughput": speed})

    ran = record(config=record().config | {"out": "/runs/a/1"})
    simulated = record(mode="simulate", config=record(mode="simulate").config | {"out": "/runs/a/2"})
    runs = [ran, simulated, on_one_device(16.0), on_one_device(64.0, "simulate"), on_one_device(8.0, folder="/runs/b")]
    assert dataframe.runs(runs)["speed_over_single"].tolist() == [2.0, 0.5, 1.0, 1.0, 1.0]


def test_what_is_measured_simulated_and_planned_is_distinguished() -> None:
    found = dataframe.runs([record(0), record(1, "simulate"), record(2, "plan"), record(3, "calibrate")])
    assert list(found["source"]) == ["measured", "simulated", "planned", "measured"]
    assert found.loc[2, "step_time_s"] == 0.4, "a plan's figures are what it predicts"


def test_a_run_of_which_little_is_known_has_a_row_too() -> None:
    bare = RunRecord("x", "infeasible", "simulated")
    found = dataframe.runs([bare, record()])
    assert found.loc[0, ["id", "status"]].tolist() == ["x", "infeasible"]
    assert pandas.isna(found.loc[0, ["throughput", "devices", "time", "bytes_skips"]]).all()
    assert list(dataframe.runs([]).columns) == [*dataframe.COLUMNS, "time", "origin"]
    assert dataframe.devices([bare]).empty


def test_a_profile_has_a_model_of_its_own() -> None:
    manifest = {"overrides": [], "simulation": {"model": "mine"}}
    stored = record(manifest=manifest, config=record().config | {"profile": "mine.json"})
    assert dataframe.runs([stored]).loc[0, "model"] == "mine"


def test_each_key_that_is_given_is_a_column_of_all_rows() -> None:
    """Values are those of the configuration, also where a run has another's key only by default."""
    config = record().config | {"optimizer": {"lr": 0.1}, "data": {"name": "synthetic"}, "seed": None}
    text = config | {
        "optimizer": {"lr": 0.01},
        "data": {"name": "text"},
        "engine": {"name": "gpipe", "balance": [1, 2]},
    }
    given = [
        "optimizer.lr=1e-2",
        "data=text",
        "engine=gpipe",
        "engine.balance=[1,2]",
        "out=x",
        "tracker=none",
        "+mine=a",
    ]
    runs = [record(0, config=config, manifest={"overrides": ["precision=fp32"]}),
            record(1, config=text, manifest={"overrides": [*given, "~seed"]})]  # fmt: skip
    found = dataframe.runs(runs)
    keys = ["chosen.precision", "optimizer.lr", "data", "engine.balance", "mine"]
    assert list(found.columns) == [*dataframe.COLUMNS, *keys, "bytes_activations", "bytes_skips", "time", "origin"]
    assert found["optimizer.lr"].tolist() == [0.1, 0.01] and found["data_parallel_size"].tolist() == [2, 2]
    assert found["data"].tolist() == ["synthetic", "text"]
    assert found["chosen.precision"].tolist() == ["fp32", "fp32"] and found["precision"].tolist() == ["float32"] * 2
    assert pandas.isna(found.loc[0, ["engine.balance", "mine"]]).all()
    assert found.loc[1, ["engine.balance", "mine"]].tolist() == ["[1, 2]", "a"]
    assert dataframe.devices(runs).groupby("optimizer.lr").size().tolist() == [2, 2]


def test_a_row_a_device() -> None:
    found = dataframe.devices([record()])
    assert found["device"].tolist() == [0, 1] and found["utilization"].tolist() == [0.5, 0.75]
    assert found["peak_memory_bytes"].tolist() == [100, 300]
    assert found["predicted_peak_memory_bytes"].tolist() == [110, 290]
    assert set(found["source"]) == {"measured"} and set(found["id"]) == {"0"}


@pytest.mark.usefixtures("computation")
def test_many_records_take_some_times_as_long_as_their_json(tmp_path: Path) -> None:
    """About six times: a record is as large as that of a pipeline of eight stages."""
    count = 1000
    own = record().to_json()
    own["metrics"]["peaks"] = [{"device": k, "bytes": 10**9, "contents": dict.fromkeys("abcdef", k)} for k in range(8)]
    own["manifest"]["environment"] = {f"NAME_{k}": "value" for k in range(40)}
    own["plan"]["stages"] = [{"device": k % 8, "first": k, "last": k} for k in range(120)]
    assert len(json.dumps(own)) > 7000
    for number in range(count):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "record.json").write_text(json.dumps(own | {"id": str(number)}))
    start_s = time.process_time()
    for number in range(count):
        json.loads((tmp_path / str(number) / "record.json").read_text())
    parsed_s = time.process_time() - start_s
    assert len(dataframe.runs(records.load([tmp_path]).records)) == count
    assert time.process_time() - start_s - parsed_s < 25 * parsed_s


def test_runs_that_differ_only_in_their_seed_are_one_row() -> None:
    def seeded(number: int, speed: float, **changes: Any) -> RunRecord:
        one = record(number)
        manifest = one.manifest | {"overrides": [*one.manifest["overrides"], f"seed={number}"]}
        metrics = one.metrics | {"throughput": speed}
        return record(number, config=one.config | {"seed": number}, metrics=metrics, manifest=manifest, **changes)

    runs = dataframe.runs([seeded(0, 10.0), seeded(1, 14.0), seeded(2, 99.0, status="oom")])
    (row,) = dataframe.over_seeds(runs).to_dict("records")
    assert (row["seeds"], row["throughput"], row["throughput_std"]) == (2, 12.0, pytest.approx(8**0.5))
    assert (row["engine"], row["last_loss"], row["last_loss_std"]) == ("gpipe", 0.25, 0.0)
