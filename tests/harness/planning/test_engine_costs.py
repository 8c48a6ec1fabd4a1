"""What an engine takes on this machine is measured once, where it is part of a prediction; a run goes on without it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness.cli.compose import compose
from harness.config import registry
from harness.core.cluster import Cluster, EngineCosts, TaskCost
from harness.core.run_files import ENGINE_COSTS, ERROR
from harness.host import devices, engine_cache
from harness.host.devices import DetectedDevices
from harness.launch import supervisor
from harness.launch.supervisor import Outcome, WorkerFailed
from harness.planning import engine_costs
from harness.report.progress import Progress

FLAT = ["cluster=flat", "cluster.devices=2", "cluster.memory_gb=1", "cluster.bandwidth_gb_s=1"]
COSTS = EngineCosts("ddp", "sgd", (TaskCost("F", 1e-3, 1e-4, 1e-5, 1e-9),), 2e-4)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REGATTA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "machines"


def measured(folder: Path, *typed: str) -> tuple[Cluster, str]:
    """The cluster, and what is printed."""
    screen = io.StringIO()
    config = compose(["engine=ddp", *typed])
    found = engine_costs.with_costs(config, Cluster(), folder, "ddp", Progress(Console(file=screen, width=200)))
    return found, screen.getvalue()


def worker(monkeypatch: pytest.MonkeyPatch, action: Callable[[Path], None]) -> list[str]:
    """Have an action do a worker's work; returns the list in which its calls will be."""
    calls = []

    def run(folder: Path, title: str, timeout_s: float | None, *words: str, **more: Any) -> None:
        calls.extend(words)
        action(folder)

    monkeypatch.setattr(supervisor, "run_worker", run)
    return calls


@pytest.mark.parametrize("typed", [FLAT, ["costs=none"], ["mode=profile"]], ids=["described", "costs=none", "profile"])
def test_where_no_prediction_needs_them(typed: list[str]) -> None:
    assert not engine_costs.count(compose(typed))


@pytest.mark.parametrize("mode", ["run", "plan", "simulate", "tune"])
def test_where_a_prediction_needs_them(mode: str) -> None:
    assert engine_costs.count(compose([f"mode={mode}", "cluster.device=cpu"]))


def test_the_host_of_a_gpu_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "detect", lambda wanted="auto": DetectedDevices("cuda", "GPU", 2, 10**9))
    assert not engine_costs.count(compose([]))


def test_they_are_measured_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = worker(monkeypatch, lambda folder: COSTS.save(folder / ENGINE_COSTS))
    for _ in range(2):
        found, printed = measured(tmp_path)
        assert found.engines == (COSTS,)
    assert calls == ["engine"]
    assert "once: what engine=ddp takes" not in printed
    assert not (tmp_path / ENGINE_COSTS).exists()
    measured(tmp_path, "optimizer.name=adam")
    assert calls == ["engine"] * 2
    assert len(list(cache.iterdir())) == 2


def test_a_run_goes_on_without_them(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(folder: Path) -> None:
        (folder / ERROR).write_text("{}")
        raise WorkerFailed(Outcome("error", "the worker was killed"))

    worker(monkeypatch, fails)
    found, printed = measured(tmp_path)
    assert found == Cluster()
    assert "note: engine ddp   is predicted without what it takes beyond its layers" in printed
    assert "the worker was killed" in printed
    assert not (tmp_path / ERROR).exists()
    assert not cache.exists()


def test_an_edit_of_an_engine_makes_them_out_of_date(tmp_path: Path, cache: Path) -> None:
    source = tmp_path / "engine"
    source.mkdir()
    (source / "engine.py").write_text("pass")
    before = engine_cache.path("mine", source, "sgd")
    assert engine_cache.path("mine", source, "sgd") == before
    (source / "session.py").write_text("pass")
    assert engine_cache.path("mine", source, "sgd") != before
    assert before.parent == cache


def test_a_damaged_file_is_measured_again(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = worker(monkeypatch, lambda folder: COSTS.save(folder / ENGINE_COSTS))
    measured(tmp_path)
    (file,) = cache.iterdir()
    file.write_text(file.read_text().replace("ddp", "dd", 1)[:-40])
    with pytest.warns(UserWarning, match="the cache is damaged, this is measured again"):
        assert measured(tmp_path)[0].engines == (COSTS,)
    assert len(calls) == 2


@pytest.mark.full
@pytest.mark.usefixtures("commands")
def test_a_run_shows_and_keeps_them(tmp_path: Path, cache: Path) -> None:
    """With a cache of its own the machine is measured, then the engine; the record holds what was counted."""
    typed = ["mode=plan", "engine=ddp", "model=mlp", "cluster.device=cpu", "cluster.devices=2"]
    for number, shown in enumerate((True, False)):
        folder = tmp_path / str(number)
        command = [sys.executable, str(registry.ROOT / "run.py"), *typed, f"out={folder}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert ("once: what engine=ddp takes" in done.stdout) is shown
        record = json.loads((folder / "record.json").read_text())
        (own,) = record["manifest"]["simulation"]["cluster"]["engines"]
        assert (own["engine"], own["optimizer"]) == ("ddp", "sgd")
        assert {one["kind"] for one in own["ops"]} >= {"F", "B", "step"}
