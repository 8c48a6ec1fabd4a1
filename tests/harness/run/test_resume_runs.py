"""A run that was stopped resumes with the losses of one never stopped; one that is finished stays."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cli.compose import compose
from harness.core.problem import CannotRun, Problem
from harness.core.record import RunRecord
from harness.launch import fork_server
from harness.run import runner
from harness.run.checkpoint_files import place, steps
from harness.trackers import none
from tests.support import known_machine, processes
from tests.support.machines import MACHINE
from tests.support.recorder import Recorder
from tests.support.run_folders import TYPED, contents, replaced

pytestmark = pytest.mark.usefixtures("commands", "fork_server")

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with known_machine.known(tmp_path_factory, MACHINE):
        yield


def run(folder: Path, *overrides: str) -> RunRecord:
    typed = [*TYPED, *overrides, f"out={folder}"]
    return runner.run(compose(typed), typed)


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(len(lines))], "no step twice, none left out"
    return [line["loss"] for line in lines]


def when(there: Callable[[], bool], then: Callable[[], None]) -> threading.Thread:
    """Do `then` as soon as it is so; it ends by itself."""

    def wait() -> None:
        deadline = time.monotonic() + 120
        while not there() and time.monotonic() < deadline:
            time.sleep(0.005)
        then()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def ranks_of(folder: Path) -> list[int]:
    """Processes that work in this folder: those of a parent that was killed end with it, a moment later."""
    return processes.running(str(folder))


def has_lines(folder: Path, count: int) -> Callable[[], bool]:
    path = folder / "metrics.jsonl"
    return lambda: path.exists() and path.read_bytes().count(b"\n") >= count


@pytest.fixture(scope="module")
def straight(cache, tmp_path_factory) -> list[float]:
    """The losses of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("straight")
    assert run(folder, "steps=118").status == "ok"
    return losses(folder)


@pytest.mark.usefixtures("commands")
def test_stopped_by_a_signal_and_started_again(straight, tmp_path, monkeypatch, capsys):
    thread = when(has_lines(tmp_path, 10), lambda: os.kill(os.getpid(), signal.SIGUSR1))
    first = run(tmp_path, "steps=118")
    thread.join()
    done = len(losses(tmp_path))
    assert first.status == "preempted" and 10 <= done < 120
    assert first.reason == f"ended by SIGUSR1 after {done} steps; the last checkpoint is after {done} steps"
    assert f"start it again with out={tmp_path} to resume after {done} steps" in capsys.readouterr().err
    tracker = Recorder()
    monkeypatch.setattr(none, "build", lambda config: tracker)
    second = run(tmp_path, "steps=118")
    assert (second.status, second.id) == ("ok", first.id)
    predicted = {key: value for key, value in second.predicted.items() if key != "parts_s"}
    assert second.plan == first.plan | {"predicted": predicted}
    assert second.manifest["resumed"] == [done]
    assert losses(tmp_path) == straight
    assert [reported[1] for reported in tracker.reported if reported[0] == "log"] == [*range(120)], (
        "mirrored from its first step"
    )
    assert second.metrics["peak_memory_bytes"], "as it was metered before"
    assert second.metrics["first_loss"] == straight[0]


@pytest.mark.usefixtures("commands", "at_length")
def test_killed_at_any_moment_and_the_newest_checkpoint_damaged(straight, tmp_path, monkeypatch):
    """The parent, with SIGKILL; its ranks end with it."""
    monkeypatch.delenv(fork_server.VARIABLE)  # whose workers' command lines do not say which run they are of
    more = ["steps=118", "launch.checkpoint_every=7"]
    command = [sys.executable, str(ROOT / "run.py"), *TYPED, *more, f"out={tmp_path}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    thread = when(has_lines(tmp_path, random.randrange(15, 60)), process.kill)
    try:
        assert process.wait() == -signal.SIGKILL
    finally:
        process.kill()
        thread.join()
    when(lambda: not ranks_of(tmp_path), lambda: None).join()
    assert not ranks_of(tmp_path)
    assert RunRecord.load(tmp_path / "record.json").status == "running"
    kept = steps(tmp_path)
    assert len(kept) == 2 and kept[0] - 7 == kept[1]
    os.truncate(place(tmp_path, kept[0]), 1000)
    last = run(tmp_path, *more)
    assert (last.status, last.manifest["resumed"]) == ("ok", [kept[1]])
    assert losses(tmp_path) == straight
    assert steps(tmp_path) == [120, 119]


@pytest.mark.usefixtures("commands")
def test_a_finished_run_trains_on_with_more_steps(straight, tmp_path, capsys):
    first = run(tmp_path, "steps=50")
    assert steps(tmp_path) == [52]
    before = contents(tmp_path)
    again = run(tmp_path, "steps=50")
    assert again == first and contents(tmp_path) == before, "it trains nothing and touches nothing"
    assert "overwrite=true" in capsys.readouterr().out
    second = run(tmp_path, "steps=118")
    assert (second.status, second.id, second.manifest["resumed"]) == ("ok", first.id, [52])
    assert losses(tmp_path) == straight
    third = run(tmp_path, "steps=8", "overwrite=true", "launch.end_checkpoint=false")
    assert (third.status, third.id != first.id, steps(tmp_path)) == ("ok", True, [])
    assert losses(tmp_path) == straight[:10]


@pytest.mark.parametrize("damage", ["gone", "a file"])
def test_a_finished_run_is_not_replaced_where_its_checkpoints_are_lost(tmp_path, damage):
    run(tmp_path, "steps=50")
    shutil.rmtree(tmp_path / "checkpoints")
    if damage == "a file":
        (tmp_path / "checkpoints").write_text("no folder")
    before = contents(tmp_path)
    typed = [*TYPED, "steps=118", f"out={tmp_path}"]
    assert runner.run(compose(typed), typed).status == "infeasible"
    assert {name: data for name, data in contents(tmp_path).items() if name != "refused.json"} == before


@pytest.mark.usefixtures("commands", "at_length")
def test_a_run_that_was_killed_after_its_last_checkpoint(straight, tmp_path):
    first = run(tmp_path, "steps=118")
    replace(first, status="running", metrics={}).save(tmp_path / "record.json")
    second = run(tmp_path, "steps=118")
    assert (second.status, second.manifest["resumed"]) == ("ok", [120])
    assert losses(tmp_path) == straight
    assert second.metrics["step_time_s"] == first.metrics["step_time_s"]


@pytest.mark.usefixtures("commands")
def test_a_refused_start_leaves_a_run_that_can_resume(straight, tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise CannotRun([Problem("cluster.memory_gb", 1, "is too small")])

    run(tmp_path, "steps=50")
    replace(RunRecord.load(tmp_path / "record.json"), status="error").save(tmp_path / "record.json")
    for name in ("metrics.jsonl", "log"):
        replaced(tmp_path / name, None)
    before = contents(tmp_path)
    for more in (["seed=1"], ["mode=plan"], ["steps=5"], ["steps=118", "tracker=none"]):
        typed = [*TYPED, *more, f"out={tmp_path}"]
        with monkeypatch.context() as patch:
            patch.setattr(runner.prepare, "prepare", refuse)
            refused = runner.run(compose(typed), typed)
        assert refused.status == "infeasible", more
        assert RunRecord.load(tmp_path / "refused.json") == refused
        assert {name: data for name, data in contents(tmp_path).items() if name != "refused.json"} == before
    assert run(tmp_path, "steps=118").manifest["resumed"] == [52]
    assert losses(tmp_path) == straight
    assert not (tmp_path / "refused.json").exists()
