"""A run that was stopped resumes in its folder: from where, when not, and with the losses of one never stopped."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from harness.cli.compose import compose
from harness.core.cluster import Cluster, Device, Link
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.plan import Plan
from harness.core.record import RunRecord
from harness.core.run_files import CHECKPOINTS
from harness.host import devices, machine
from harness.host.machine import Machine
from harness.interfaces import BatchShape, PlanRequest
from harness.run import runner
from harness.run.checkpoint_files import place, steps
from harness.run.resume import Resumed, SamePlan, find_resumable
from harness.trackers import none
from tests.harness.run.test_runner import Recorder

ROOT = Path(__file__).parents[3]
TYPED = ["engine=ddp", "model=mlp", "batch.size=8", "batch.micro_batches=2", "cluster.device=cpu", "cluster.devices=2",
         "mesh.data=2", "precision=fp64", "tracker=none", "launch.grace_s=600", "warmup=2", "optimizer.name=adam",
         "optimizer.lr=0.001"]  # fmt: skip
MACHINE = Machine(
    Device(devices.cpu_model(), 10**10, {"float32": 1e12}, 1e10, kernel_s=1e-6), Link(1e-5, 1e-9), None, 1.8
)


# -- what is taken up, without any training


def left(folder: Path, *checkpoints: int, lines: int = 9, status: str = "preempted", typed: list[str] = TYPED) -> Path:
    """The folder of a run that was ended after so many lines, with checkpoints after these steps."""
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(compose([*typed, f"out={folder}"]), resolve=True))
    RunRecord("id", status, manifest={"resumed": [1]}).save(folder / "record.json")  # type: ignore[arg-type]
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {k}}}\n' for k in range(lines)) + '{"step": 9, "lo')
    (folder / CHECKPOINTS).mkdir()
    for step in checkpoints:
        with zipfile.ZipFile(place(folder, step), "w") as file:
            file.writestr("weights", b"1" * 1000)
    return folder


def taken(folder: Path, *overrides: str, typed: list[str] = TYPED) -> tuple[Resumed | None, list[str]]:
    said: list[str] = []
    config = compose([*typed, *overrides, f"out={folder}"])
    return find_resumable(folder, config, said.append), said


def test_it_goes_on_from_the_newest(tmp_path: Path) -> None:
    found, said = taken(left(tmp_path, 4, 6))
    assert found and not said
    assert (found.step, found.record.id, found.steps) == (6, "id", [1, 6])
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [*range(6)]


@pytest.mark.parametrize("status", ["running", "error", "oom", "timeout", "node_lost", "infeasible"])
def test_however_it_was_ended(tmp_path: Path, status: str) -> None:
    found, _ = taken(left(tmp_path, 4, status=status))
    assert found and found.step == 4


@pytest.mark.parametrize("more", ["steps=11", "launch.checkpoint_every=3", "launch.timeout_s=7", "tracker=wandb"])
def test_what_may_differ(tmp_path: Path, more: str) -> None:
    assert taken(left(tmp_path, 6), more)[0]


@pytest.mark.parametrize(
    ("differs", "reported"),
    [
        ("seed=1", "seed 0, here it is 1"),
        ("optimizer.lr=0.5", "optimizer.lr 0.001, here it is 0.5"),
        ("warmup=1", "warmup 2, here it is 1"),
        ("steps=4", "a checkpoint after 6 steps, here there are 6"),
    ],
)
def test_another_run_starts_again_and_says_why(tmp_path: Path, differs: str, reported: str) -> None:
    found, said = taken(left(tmp_path, 6), differs)
    assert found is None
    assert said == [f"the unfinished run in this folder has {reported}: this one starts again from step 0"]


@pytest.mark.parametrize("overrides", [["mode=plan"], ["mode=simulate"]])
def test_only_a_run_goes_on(tmp_path: Path, overrides: list[str]) -> None:
    assert taken(left(tmp_path, 6), *overrides) == (None, [])


def test_a_run_that_is_ok_and_one_without_a_record_do_not_go_on(tmp_path: Path) -> None:
    unfinished = left(tmp_path, 6, status="ok")
    assert taken(unfinished) == (None, [])
    (tmp_path / "record.json").unlink()
    assert taken(unfinished) == (None, [])


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    unfinished = left(tmp_path, 4, 6)
    os.truncate(place(tmp_path, 6), 500)
    found, said = taken(unfinished)
    assert found and found.step == 4
    assert said == ["the checkpoint after 6 steps is damaged, or its lines are lost: it is not used"]
    assert steps(tmp_path) == [4]


def test_so_is_one_whose_lines_are_lost(tmp_path: Path) -> None:
    found, said = taken(left(tmp_path, 4, 6, lines=5))
    assert found and found.step == 4 and len(said) == 1


def test_without_any_that_is_whole_it_starts_again(tmp_path: Path) -> None:
    found, said = taken(left(tmp_path, 4, 6, lines=2))
    assert found is None and len(said) == 2


class Other:
    """A planner that would put all layers but one on device 0."""

    def plan(self, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, request: PlanRequest) -> Plan:
        return Plan.contiguous([3, 1], 2) if request.pipeline == 2 else Plan.contiguous([4], 2)


def test_the_plan_stays_unless_there_are_other_devices() -> None:
    """A profile that was measured again must not move layers: other stages round otherwise."""
    before = Plan.contiguous([2, 2], 2)
    before = replace(before, mesh=replace(before.mesh, pipeline=2))
    profile = ModelProfile(tuple(LayerProfile(str(k)) for k in range(4)), "m")

    def planned(pipeline: int) -> tuple[int, ...]:
        request = PlanRequest(BatchShape(8, 2), pipeline)
        return tuple(SamePlan(before, Other()).plan(profile, Cluster(), MemoryModel(), request).balance)

    assert (planned(2), planned(1)) == ((2, 2), (4,))


# -- whole runs


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REGATTA_CACHE", str(tmp_path_factory.mktemp("cache")))
        machine.store(MACHINE)
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


def ranks_of(folder: Path) -> list[Path]:
    """Processes that work in this folder: those of a parent that was killed end with it, a moment later."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found += [path] if str(folder).encode() in path.read_bytes() else []
    return found


def has_lines(folder: Path, count: int) -> Callable[[], bool]:
    path = folder / "metrics.jsonl"
    return lambda: path.exists() and path.read_bytes().count(b"\n") >= count


@pytest.fixture(scope="module")
def straight(cache, tmp_path_factory) -> list[float]:
    """The losses of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("straight")
    assert run(folder, "steps=118").status == "ok"
    return losses(folder)


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
    assert (second.status, second.id, second.plan) == ("ok", first.id, first.plan | {"predicted": second.predicted})
    assert second.manifest["resumed"] == [done]
    assert losses(tmp_path) == straight
    assert [reported[1] for reported in tracker.reported if reported[0] == "log"] == [*range(120)], (
        "mirrored from its first step"
    )
    assert second.metrics["peak_memory_bytes"], "as it was metered before"
    assert second.metrics["first_loss"] == straight[0]


def test_killed_at_any_moment_and_the_newest_checkpoint_damaged(straight, tmp_path):
    """The parent, with SIGKILL; its ranks end with it."""
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
    assert steps(tmp_path) == [119, 112]
