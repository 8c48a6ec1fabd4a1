"""What an engine takes on this machine is measured once, where it is part of a prediction; a run goes on without it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness.cli.compose import compose
from harness.config import registry
from harness.core.cluster import Cluster, EngineCosts, TaskCost
from harness.core.model_profile import LayerProfile, LayerTimes, ModelProfile
from harness.core.problem import Problem, refuse
from harness.core.run_files import ENGINE_COSTS, ERROR, FLIGHT_RECORDER
from harness.core.run_files import MACHINE as MACHINE_FILE
from harness.host import devices, engine_cache, profile_cache, run_queue
from harness.host.devices import DetectedDevices
from harness.host.machine import Machine
from harness.launch import supervisor
from harness.launch.supervisor import Outcome, WorkerFailed
from harness.planning import engine_costs
from harness.report.progress import Progress
from tests.support.known_machine import MACHINE

FLAT = ["cluster=flat", "cluster.devices=2", "cluster.memory_gb=1", "cluster.bandwidth_gb_s=1"]
COSTS = EngineCosts("ddp", "sgd", (TaskCost("F", 1e-3, 1e-4, 1e-5, 1e-9),), 2e-4)
PROFILE = ModelProfile((LayerProfile("l", 1.0, 2.0, param_bytes=8, weights=1),), "unet", times="measured")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REGATTA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "machines"


def measured(folder: Path, *typed: str, profile: ModelProfile = PROFILE) -> tuple[Cluster, str]:
    """The cluster, and what is printed."""
    screen = io.StringIO()
    config, progress = compose(["engine=ddp", *typed]), Progress(Console(file=screen, width=300))
    found = engine_costs.with_costs(config, Cluster(), profile, MACHINE, folder, "ddp", progress)
    return found, screen.getvalue()


def worker(monkeypatch: pytest.MonkeyPatch, action: Callable[[Path], None]) -> list[str]:
    """Have an action do a worker's work; returns the list in which its calls will be."""
    calls = []

    def run(folder: Path, title: str, timeout_s: float | None, *words: str, **more: Any) -> None:
        assert Machine.load(folder / MACHINE_FILE) == MACHINE
        calls.extend(words)
        action(folder)

    monkeypatch.setattr(supervisor, "run_worker", run)
    return calls


@pytest.mark.parametrize(
    "typed", [FLAT, ["cluster.task_s=0.001"], ["mode=profile"]], ids=["described", "given by the user", "profile"]
)
def test_where_no_prediction_needs_them(typed: list[str]) -> None:
    assert not engine_costs.count(compose(typed), PROFILE)


@pytest.mark.parametrize("times", ["analytic", "none", "scaled", "as given"])
def test_layer_times_of_elsewhere(times: LayerTimes) -> None:
    """Costs of this machine do not mix with times that are not."""
    assert not engine_costs.count(compose(["cluster.device=cpu"]), replace(PROFILE, times=times))


@pytest.mark.parametrize("mode", ["run", "plan", "simulate", "tune"])
def test_where_a_prediction_needs_them(mode: str) -> None:
    assert engine_costs.count(compose([f"mode={mode}", "cluster.device=cpu"]), PROFILE)


def test_the_host_of_a_gpu_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "detect", lambda wanted="auto": DetectedDevices("cuda", "GPU", 2, 10**9))
    assert not engine_costs.count(compose([]), PROFILE)


def test_they_are_measured_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each optimizer, as far as it matters how long its steps take."""
    calls = worker(monkeypatch, lambda folder: COSTS.save(folder / ENGINE_COSTS))
    for _ in range(2):
        found, printed = measured(tmp_path, "optimizer.lr=0.5")
        assert found.engines == (COSTS,)
        measured(tmp_path)
    assert calls == ["engine"]
    assert "once: what engine=ddp takes" not in printed
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    for number, keys in enumerate((["optimizer.name=adam"], ["optimizer.momentum=0.9"], ["remeasure=true"])):
        measured(tmp_path, *keys)
        assert len(calls) == 2 + min(number, 1)  # what this process has measured is new enough
    assert len(list(cache.iterdir())) == 3


def test_a_run_goes_on_without_them(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not tried again and again: a hang would take minutes of each run."""

    def fails(folder: Path) -> None:
        (folder / ERROR).write_text("{}")
        (folder / FLIGHT_RECORDER).mkdir()
        raise WorkerFailed(Outcome("error", "the worker was killed"))

    calls = worker(monkeypatch, fails)
    for _ in range(2):
        found, printed = measured(tmp_path)
        assert found.used_with("ddp", "sgd").engine_costs.of("F") == TaskCost("F")
        assert "note: engine ddp   is predicted without what it takes beyond its layers" in printed
        assert "the worker was killed" in printed and "remeasure=true tries again" in printed
        assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    assert len(calls) == 1


def test_a_refusal_of_the_measurement_is_none_of_the_run(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker(monkeypatch, lambda folder: refuse([Problem("model", "chain", "is no model of the user's")]))
    assert "is no model of the user's" in measured(tmp_path)[1]


def test_a_busy_machine(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said; and measured again once, by a later process that finds the machine quiet."""
    slowed = [1.5, 1.4, 1.3]
    calls = worker(monkeypatch, lambda folder: replace(COSTS, slowed=slowed.pop(0)).save(folder / ENGINE_COSTS))
    monkeypatch.setattr(run_queue, "quiet", lambda: True)
    for count in (1, 1):
        assert "measured on a busy machine, 1.50 times as slow" in measured(tmp_path)[1]
        assert len(calls) == count
    monkeypatch.setattr(profile_cache, "BEGUN_S", time.time() + 60)
    for _ in range(2):
        found, printed = measured(tmp_path)
        assert found.engines[0].slowed == 1.4 and len(calls) == 2
    assert "1.40 times as slow" in printed


def test_profiles_that_do_not_count_weights(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = worker(monkeypatch, lambda folder: COSTS.save(folder / ENGINE_COSTS))
    older = ModelProfile((LayerProfile("l", 1.0, 2.0, param_bytes=8),), "unet", times="measured")
    found, printed = measured(tmp_path, profile=older)
    assert (found, calls) == (Cluster(), [])
    assert "does not say how many weights layers have" in printed


def test_an_edit_of_an_engine_makes_them_out_of_date(tmp_path: Path, cache: Path) -> None:
    source = tmp_path / "engine"
    source.mkdir()
    (source / "engine.py").write_text("pass")
    before = engine_cache.path("mine", source, "sgd", "here")
    assert engine_cache.path("mine", source, "sgd", "here") == before
    (source / "session.py").write_text("pass")
    assert engine_cache.path("mine", source, "sgd", "here") != before
    assert before.parent == cache
    assert engine_cache.path("mine", source, "sgd", "elsewhere") != engine_cache.path("mine", source, "sgd", "here")
    assert engine_cache.path("mine", source, "sgd fused", "here") != engine_cache.path("mine", source, "sgd", "here")


def test_a_damaged_file_is_measured_again(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = worker(monkeypatch, lambda folder: COSTS.save(folder / ENGINE_COSTS))
    measured(tmp_path)
    (file,) = cache.iterdir()
    file.write_text(file.read_text()[:-40])
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
