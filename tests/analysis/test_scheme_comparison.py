"""All schemes side by side: which records, and what their lines say."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis import pack, scheme_comparison
from analysis.paper_pages import Missing, Picture
from harness.core.record import RunRecord, Status


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pack, "RUNS", tmp_path)
    monkeypatch.setattr(pack, "ARCHIVES", tmp_path / "archives")
    return tmp_path


def ran(runs: Path, name: str, keys: list[str], status: Status = "ok", reason: str = "", speed: float = 8.0) -> None:
    config = {group: {"name": group} for group in ("engine", "planner", "cluster")} | {"model": {"name": "unet"}}
    metrics = {"throughput": speed, "step_time_s": 2.0, "utilization": [0.5, 0.7], "peak_memory_bytes": [2**20, 2**21],
               "predicted_over_measured": {"step_time_s": 0.5}}  # fmt: skip
    record = RunRecord(name, status, reason=reason, config=config, metrics=metrics if status == "ok" else {},
                       manifest={"overrides": keys})  # fmt: skip
    record.save(runs / "schemes-local" / name / "record.json")


def test_a_line_has_means_over_devices_and_the_fullest_one(runs: Path) -> None:
    ran(runs, "a", ["engine=torch_pipelining", "engine.schedule=1f1b"])
    (row,) = scheme_comparison.section("measured").rows
    assert row == ("unet", "torch_pipelining schedule=1f1b", "planner", "8.0", "2.00 s", "60 %", "2.0 MiB", "0.50")


def test_what_cannot_be_says_why(runs: Path) -> None:
    ran(runs, "a", ["engine=periodic"], "infeasible", "engine=periodic cannot run:\n  mesh.pipeline 4   is too much")
    (row,) = scheme_comparison.section("measured").rows
    assert row[3:] == ("-", "-", "-", "-", "mesh.pipeline 4 is too much")


def test_bars_are_in_order_of_their_speed(runs: Path) -> None:
    for name, speed in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
        ran(runs, name, [f"engine={name}"], speed=speed)
    figure = scheme_comparison.figure("measured")
    assert figure
    assert [bar.get_width() for bar in figure.axes[0].patches] == [1.0, 2.0, 3.0]
    assert isinstance(scheme_comparison.picture("measured"), Picture)


def test_nothing_run_says_what_to_run() -> None:
    assert scheme_comparison.picture("measured") == Missing(
        "schemes-local", "Not run yet: python run.py -m +sweeps=schemes scale=local"
    )
    assert scheme_comparison.section("simulated").rows == ()
