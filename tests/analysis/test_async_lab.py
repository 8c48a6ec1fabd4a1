"""Asynchronous pipelines compared: what the tables say of records, and the small sweep through the front door."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import run
from analysis import pack
from analysis.async_lab import plots, tables
from analysis.async_lab import runs as lab
from analysis.async_lab.__main__ import main
from analysis.async_lab.runs import LAST, Scheme
from analysis.paper_pages import Missing, Picture
from harness.config.registry import ROOT
from harness.core.record import RunRecord

UPDATES = 2 * LAST


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pack, "RUNS", tmp_path)
    monkeypatch.setattr(pack, "ARCHIVES", tmp_path / "archives")
    return tmp_path


def trained(
    runs: Path,
    versions: str,
    losses: Sequence[float],
    stages: int = 1,
    seed: int = 0,
    planner: str = "uniform",
    **keys: Any,
) -> None:
    corrections = {"prediction": False, "error_feedback": False, "lr_steps": 0} | keys
    engine = {"name": "delayed", "stages": stages, "versions": versions, "in_flight": None, "corrections": corrections}
    optimizer = {"name": "adamw", "lr": 0.1, "momentum": 0.0, "beta1": None}
    name = f"{versions}-{stages}-{seed}-{len(keys)}-{planner}"
    diverged = not all(map(math.isfinite, losses))
    record = RunRecord(
        name,
        "error" if diverged else "ok",
        source="measured",
        reason="Diverged: the loss is nan at step 7" if diverged else "",
        config={
            "mode": "run",
            "engine": engine,
            "planner": {"name": planner},
            "model": {"name": "gpt"},
            "optimizer": optimizer,
            "seed": seed,
        },
        metrics={"losses": [*filter(math.isfinite, losses)]},
        manifest={"overrides": [name]},
    )
    record.save(runs / "async_lab-local" / name / "record.json")


def simulated(
    runs: Path, engine: str, stages: int, step_time_s: float, period_s: float | None = None, mode: str = "simulate"
) -> None:
    name = f"{engine}-{stages}-{mode}"
    record = RunRecord(
        name,
        "ok",
        source="simulated",
        config={
            "mode": mode,
            "engine": {"name": engine} | ({"update_every": 4} if period_s else {}),
            "batch": {"micro_batches": 8 if period_s else 4},
            "mesh": {"pipeline": stages},
        },
        metrics={
            "step_time_s": step_time_s,
            "utilization": [0.5, 0.7],
            "peak_memory_bytes": [2**30, 2**31],
            **({"period_s": period_s} if period_s else {}),
        },
        manifest={"overrides": [name]},
    )
    record.save(runs / "async_lab_pipelines" / name / "record.json")


def falling(last: float) -> list[float]:
    """2 until the last updates, which have this mean."""
    return [2.0] * (UPDATES - LAST) + [last - 0.1, last + 0.1] * (LAST // 2)


def rows(number: int = 0) -> list[tuple[str, ...]]:
    return list(tables.sections(lab.newest(lab.load()))[number].rows)


def test_means_over_seeds_and_what_is_lost_to_synchronous_training(runs: Path) -> None:
    for seed, (flush, stash) in enumerate([(1.0, 1.3), (1.2, 1.4), (1.1, 1.6)]):
        trained(runs, "flush", falling(flush), seed=seed)
        trained(runs, "stash", falling(stash), stages=4, seed=seed)
    assert rows() == [
        ("adamw, lr 0.1", "flush", "any", "1", "1.100", "0.200", "-", "-", "0 of 3"),
        ("adamw, lr 0.1", "stash", "4", "2.5", "1.433", "0.300", "+0.333", "-", "0 of 3"),
    ]


def test_what_diverges_is_a_row(runs: Path) -> None:
    trained(runs, "flush", falling(1.0))
    trained(runs, "stash", falling(math.nan), stages=8)
    trained(runs, "none", falling(3.0), stages=8)
    assert [(row[1], row[4], row[-1]) for row in rows()] == [
        ("flush", "1.000", "0 of 1"),
        ("none", "3.000", "1 of 1"),
        ("stash", "-", "1 of 1"),
    ]


def test_copies_of_the_weights_and_names_of_methods(runs: Path) -> None:
    trained(runs, "flush", falling(1.0), prediction=False)
    trained(runs, "2bw", falling(1.0), error_feedback=True)
    trained(runs, "stash", falling(1.0), stages=4, prediction=True)
    trained(runs, "stash", falling(1.0), stages=4, planner="balance")
    trained(runs, "2bw", falling(1.0), planner="balance", error_feedback=True, seed=1)
    trained(runs, "none", falling(1.0), stages=4, lr_steps=9)
    assert [(row[1], row[3]) for row in rows()] == [
        ("flush", "1"),
        ("2bw + error feedback", "3"),
        ("none + lr by delay", "1"),
        ("stash + prediction", "4.5"),
        ("stash + stages by planner=balance", "2.5"),
    ]


def test_at_equal_time_a_synchronous_pipeline_has_made_fewer_updates(runs: Path) -> None:
    """Four micro-batches of a period of 2 s against a step of 16 s: half of the updates."""
    trained(runs, "flush", falling(1.0))
    trained(runs, "stash", falling(1.5), stages=4)
    simulated(runs, "pipeline", 4, step_time_s=16.0)
    simulated(runs, "periodic", 4, step_time_s=20.0, period_s=2.0)
    simulated(runs, "pipeline", 4, step_time_s=1.0, mode="plan")
    assert ("adamw, lr 0.1", f"flush, {UPDATES // 2} updates", "4", "", "", "", "", "2.000", "") in rows()
    assert rows(1) == [
        ("1F1B, drains before an update", "4", "16.00 s", "1.00 x", "60 %", "2.0 GiB"),
        ("does not drain", "4", "8.00 s", "2.00 x", "75 %", "2.0 GiB"),
    ]
    scheme = Scheme("gpt", "adamw, lr 0.1", "stash", 4)
    times = lab.pipelines(lab.load().records)
    assert lab.updates_at_equal_time(scheme, 100, times, 4) == 100


def test_pictures(runs: Path) -> None:
    for seed in range(2):
        trained(runs, "flush", falling(1.0 + seed / 10), seed=seed)
        trained(runs, "stash", falling(1.5 + seed / 10), stages=4, seed=seed)
        trained(runs, "stash", falling(1.7 + seed / 10), stages=8, seed=seed)
    assert isinstance(plots.picture("gpt_curves"), Picture)
    figure = plots.figures(lab.load())["gpt_depth"]
    assert [[*line.get_ydata()] for line in figure.axes[0].lines] == [  # type: ignore[arg-type]
        pytest.approx([1.05, 1.05]),
        pytest.approx([1.55, 1.75]),
    ]


def test_the_page_has_the_tables_of_the_committed_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "ARCHIVES", ROOT / "analysis" / "results" / "records")
    found = tables.sections(lab.newest(lab.load()))
    page = tables.PAGE.read_text()
    assert tables.with_tables(page, found) == page


def test_nothing_run_says_what_to_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "python run.py -m +sweeps=async_lab" in capsys.readouterr().err
    assert isinstance(plots.picture("gpt_curves"), Missing)


@pytest.mark.full
def test_the_small_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trained, in processes of its own."""
    assert run.main(["-m", "+sweeps=async_lab", "scale=small", f"out={tmp_path / 'lab'}"], {}) == 0
    capsys.readouterr()
    assert main([str(tmp_path / "lab"), "--out", str(tmp_path / "pictures")]) == 0
    printed = capsys.readouterr().out
    assert "stash + prediction + error feedback" in printed and "0 of 2" in printed
    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == [
        "async_lab_gpt_curves.png",
        "async_lab_gpt_depth.png",
    ]
