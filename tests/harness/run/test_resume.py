"""A run that was stopped resumes in its folder: from where, when not, and with the losses of one never stopped."""

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
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from harness.cli.compose import compose
from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.plan import Plan
from harness.core.problem import CannotRun, Problem
from harness.core.record import RunRecord
from harness.core.serialization import finite
from harness.host import machine
from harness.interfaces import BatchShape, PlanRequest
from harness.launch import fork_server
from harness.run import runner
from harness.run.checkpoint_files import RunState, place, steps, write
from harness.run.resume import Resumed, SamePlan, find_finished, find_resumable, refuse_to_replace, say_what_is_replaced
from harness.run.run_folder import RunFolder, has_trained
from harness.trackers import none
from tests.problems import refused, row
from tests.support import processes
from tests.support.machines import MACHINE
from tests.support.recorder import Recorder

pytestmark = pytest.mark.usefixtures("commands", "fork_server")

ROOT = Path(__file__).parents[3]
TYPED = ["engine=ddp", "model=mlp", "batch.size=8", "batch.micro_batches=2", "cluster.device=cpu", "cluster.devices=2",
         "mesh.data=2", "precision=fp64", "tracker=none", "launch.grace_s=600", "warmup=2", "optimizer.name=adam",
         "optimizer.lr=0.001"]  # fmt: skip


PLAN = Plan.contiguous([2, 2], 2)


# -- what it resumes from, without any training


def left(
    folder: Path,
    *checkpoints: int,
    status: str = "preempted",
    typed: list[str] = TYPED,
    missing: tuple[str, ...] = (),
) -> Path:
    """The folder of a run that was ended in its tenth step, with checkpoints after these; keys may be missing."""
    config = compose([*typed, f"out={folder}"])
    container: Any = OmegaConf.to_container(config, resolve=True)
    for key in missing:
        group, _, own = key.partition(".")
        del container[group][own]
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(container)))
    PLAN.save(folder / "plan.json")
    manifest = {"resumed": [1]}
    record = RunRecord("id", status, config=finite(container), manifest=manifest)  # type: ignore[arg-type]
    record.save(folder / "record.json")
    lines = [f'{{"step": {step}}}' for step in range(9)]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines) + '{"step": 9, "lo')
    for step in checkpoints:
        state = RunState(step, record.config, PLAN.to_json(), "id", manifest, tuple(lines[:step]))
        write(folder, state, lambda file: torch.save({"weights": torch.ones(1000)}, file))
    return folder


def resumes(folder: Path, *overrides: str, typed: list[str] = TYPED) -> tuple[Resumed | None, list[str]]:
    """What this run resumes from, and what it says; nothing is touched."""
    said: list[str] = []
    before = contents(folder)
    try:
        return find_resumable(folder, compose([*typed, *overrides, f"out={folder}"]), said.append, "this run"), said
    finally:
        assert contents(folder) == before


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_it_resumes_from_the_newest(tmp_path: Path) -> None:
    found, said = resumes(left(tmp_path, 4, 6))
    assert found and not said
    assert (found.step, found.state.id, found.steps, found.plan) == (6, "id", [1, 6], PLAN)
    assert [json.loads(line)["step"] for line in found.state.lines] == [*range(6)]


@pytest.mark.parametrize("status", ["running", "error", "oom", "timeout", "node_lost", "infeasible", "ok"])
def test_however_it_was_ended(tmp_path: Path, status: str) -> None:
    found, _ = resumes(left(tmp_path, 4, status=status), "steps=11")
    assert found and found.step == 4


@pytest.mark.parametrize(
    "more",
    [
        "steps=11",
        "launch.checkpoint_every=3",
        "launch.timeout_s=7",
        "tracker=wandb",
        "overwrite=true",
        "race.minutes=1",
    ],
)
def test_what_may_differ(tmp_path: Path, more: str) -> None:
    assert resumes(left(tmp_path, 6), more)[0]


@pytest.mark.parametrize(
    ("now", "same"), [([], True), (["optimizer.fused=true"], False), (["engine.bucket_mb=1"], False)]
)
def test_a_key_of_a_later_version_had_its_default(tmp_path: Path, now: list[str], same: bool) -> None:
    folder = left(
        tmp_path, 6, missing=("optimizer.fused", "precision.tf32", "precision.cudnn_benchmark", "engine.bucket_mb")
    )
    if same:
        assert resumes(folder, *now)[0]
    else:
        with pytest.raises(CannotRun, match=now[0].partition("=")[0]):
            resumes(folder, *now)


@pytest.mark.parametrize(
    ("differs", "named"),
    [
        (["seed=1"], ["seed 0 (here 1)"]),
        (["optimizer.lr=0.5"], ["optimizer.lr 0.001 (here 0.5)"]),
        (["warmup=1"], ["warmup 2 (here 1)"]),
        (["steps=3"], ["after 6 steps", "steps 10 (here 3)"]),
        (["engine=single", "mesh.data=1"], ["with engine.name ddp (here single)", "mesh.data 2 (here 1)"]),
        (["model=gpt", "data=synthetic"], ["with model.name mlp (here gpt)", " more"]),
    ],
)
def test_good_checkpoints_of_other_keys_are_refused(tmp_path: Path, differs: list[str], named: list[str]) -> None:
    with pytest.raises(CannotRun) as caught:
        resumes(left(tmp_path, 6), *differs)
    (problem,) = refused(caught)
    assert row(problem) == ("out", str(tmp_path), [f"out={tmp_path}-2", "overwrite=true"])
    assert all(text in problem.message for text in named), problem.message
    assert resumes(tmp_path, *differs, "overwrite=true") == (None, [])


def test_a_finished_run_is_not_made_shorter(tmp_path: Path) -> None:
    """Its only checkpoint is one on the way."""
    with pytest.raises(CannotRun) as caught:
        resumes(left(tmp_path, 6, status="ok"), "steps=8")
    assert "steps 10 (here 8)" in refused(caught)[0].message


def replaces(folder: Path, *overrides: str) -> list[str]:
    """What a run that cannot resume says before it begins; raises CannotRun if it would replace steps."""
    said: list[str] = []
    before = contents(folder)
    try:
        refuse_to_replace(folder, compose([*TYPED, *overrides, f"out={folder}"]), said.append, "this run")
    finally:
        assert contents(folder) == before
    return said


@pytest.mark.parametrize("metrics", ["whole", "gone"])
@pytest.mark.parametrize("steps", ["steps=10", "steps=5", "steps=20"])
def test_a_finished_run_without_a_checkpoint_is_not_replaced(tmp_path: Path, steps: str, metrics: str) -> None:
    left(tmp_path, status="ok")
    if metrics == "gone":
        (tmp_path / "metrics.jsonl").unlink()
    problem = only_problem(lambda: replaces(tmp_path, steps))
    assert problem.key == "out" and "a finished run that has ended after 12 steps" in problem.message
    assert problem.fixes == ({"out": f"{tmp_path}-2"}, {"overwrite": True})
    assert replaces(tmp_path, steps, "overwrite=true") == []


def test_steps_of_another_run_are_not_replaced(tmp_path: Path) -> None:
    problem = only_problem(lambda: replaces(left(tmp_path), "seed=1"))
    assert "ended after 9 steps with seed 0 (here 1)" in problem.message and {"overwrite": True} in problem.fixes
    (tmp_path / "record.json").write_text("damaged")
    assert "a run without a readable record" in only_problem(lambda: replaces(tmp_path)).message


def test_an_unfinished_run_without_a_checkpoint_begins_again_and_says_so(tmp_path: Path) -> None:
    assert replaces(left(tmp_path)) == [
        "there is no checkpoint to resume from: the run, which had ended after 9 steps, begins again"
    ]
    (tmp_path / "metrics.jsonl").unlink()
    assert replaces(tmp_path, "seed=1") == []


def only_problem(command: Callable[[], object]) -> Problem:
    with pytest.raises(CannotRun) as caught:
        command()
    (problem,) = refused(caught)
    return problem


def test_steps_without_a_checkpoint_count_for_every_mode(tmp_path: Path) -> None:
    """mode=plan and the like ask `has_trained`, a run `refuse_to_replace`."""
    assert has_trained(left(tmp_path))
    (tmp_path / "record.json").write_text("damaged")
    assert has_trained(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    assert not has_trained(tmp_path)


def test_a_result_without_training_is_replaced_and_said(tmp_path: Path) -> None:
    said: list[str] = []

    def replaced_by(*overrides: str) -> list[str]:
        said.clear()
        say_what_is_replaced(tmp_path, compose([*TYPED, *overrides, f"out={tmp_path}"]), said.append)
        return said

    left(tmp_path, status="ok", typed=[*TYPED, "mode=simulate"])
    assert replaced_by("mode=simulate", "steps=3") == []
    assert replaced_by("mode=run") == [f"replaces the result of mode=simulate in {tmp_path}"]
    assert replaced_by("mode=run", "overwrite=true") == []
    assert replaced_by("mode=simulate", "seed=1") == [
        f"replaces the result of mode=simulate in {tmp_path}, with seed 0 (here 1)"
    ]
    left(tmp_path, status="ok")
    assert replaced_by("seed=1") == [], "training is refused"


WRONG = {"warmup": None, "steps": "many", "mode": 3, "batch": [], "model": "mlp", "seed": {"x": 1}}


@pytest.mark.parametrize("status", ["ok", "preempted"])
@pytest.mark.parametrize("key", WRONG)
def test_a_record_with_values_of_other_types_is_no_obstacle(tmp_path: Path, key: str, status: str) -> None:
    """A checkpoint is enough; without one nothing that is trained is replaced."""
    record = RunRecord.load(left(tmp_path, 6, status=status) / "record.json")
    replace(record, config=record.config | {key: WRONG[key]}).save(tmp_path / "record.json")
    found, _ = resumes(tmp_path)
    assert found and found.step == 6
    assert find_finished(tmp_path, compose([*TYPED, f"out={tmp_path}"])) is None
    shutil.rmtree(tmp_path / "checkpoints")
    if (key, status) == ("steps", "preempted"):  # an unfinished run may be of more steps
        assert "begins again" in replaces(tmp_path)[0]
        return
    problem = only_problem(lambda: replaces(tmp_path))
    assert problem.fixes == ({"out": f"{tmp_path}-2"}, {"overwrite": True})


def test_a_finished_run_whose_figures_have_other_types_is_not_shown(tmp_path: Path) -> None:
    record = RunRecord.load(left(tmp_path, status="ok") / "record.json")
    replace(record, metrics={"throughput": "fast"}).save(tmp_path / "record.json")
    assert find_finished(tmp_path, compose([*TYPED, f"out={tmp_path}"])) is None
    assert "a finished run" in only_problem(lambda: replaces(tmp_path)).message


@pytest.mark.parametrize("name", ["step-0099.pt", "step-\u0669.pt", "step-+9.pt", "step-9.5.pt", "step-1e3.pt"])
def test_only_names_as_a_run_spells_them_are_checkpoints(tmp_path: Path, name: str) -> None:
    shutil.copy(place(left(tmp_path, 4, 6), 6), tmp_path / "checkpoints" / name)
    assert steps(tmp_path) == [6, 4]
    found, said = resumes(tmp_path)
    assert found and (found.step, found.unusable, said) == (6, (), [])


def test_a_checkpoint_by_the_name_of_another_step(tmp_path: Path) -> None:
    """It is not used, says what it is, and is not taken for one of the last two."""
    for wrong in (98, 99):
        shutil.copy(place(left(tmp_path, 4, 6), 6), place(tmp_path, wrong))
    found, said = resumes(tmp_path)
    assert found and (found.step, found.unusable) == (6, (99, 98))
    assert said[0].endswith("step-99.pt is the one after 6 steps, whose name is step-6.pt: it is not used")
    lines = tuple(f'{{"step": {step}}}' for step in range(7))
    write(tmp_path, replace(found.state, step=7, lines=lines), lambda file: torch.save({}, file))
    assert steps(tmp_path) == [99, 98, 7, 6]


@pytest.mark.parametrize("overrides", [["mode=plan"], ["mode=simulate"]])
def test_only_a_run_resumes(tmp_path: Path, overrides: list[str]) -> None:
    assert resumes(left(tmp_path, 6), *overrides) == (None, [])


def test_a_run_that_is_finished(tmp_path: Path) -> None:
    left(tmp_path, 6, status="ok")
    for more, finished in {"": True, "steps=11": False, "seed=1": False, "overwrite=true": False}.items():
        config = compose([*TYPED, *filter(None, [more]), f"out={tmp_path}"])
        assert (find_finished(tmp_path, config) is not None) == finished, more
    left(tmp_path, 6)
    assert find_finished(tmp_path, compose([*TYPED, f"out={tmp_path}"])) is None


def replaced(path: Path, data: bytes | None) -> None:
    """By other bytes, or by a folder."""
    path.unlink()
    path.mkdir() if data is None else path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "cut off": lambda path: os.truncate(path, path.stat().st_size // 4),
    "empty": lambda path: os.truncate(path, 0),
    "other bytes": lambda path: replaced(path, random.Random(0).randbytes(3000)),
    "gone": lambda path: path.unlink(),
    "a folder": lambda path: replaced(path, None),
    "a FIFO": lambda path: (path.unlink(), os.mkfifo(path))[1],
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["record.json", "metrics.jsonl", "config.yaml", "plan.json"])
def test_a_checkpoint_is_enough(tmp_path: Path, name: str, damage: str) -> None:
    DAMAGES[damage](left(tmp_path, 4, 6) / name)
    found, said = resumes(tmp_path)
    assert found and (found.step, found.steps, found.plan) == (6, [1, 6], PLAN)
    (note,) = said
    assert name in note
    with pytest.raises(CannotRun):
        resumes(tmp_path, "seed=1")


@pytest.mark.parametrize("damage", ["gone", "a folder", "a FIFO"])
def test_a_log_that_is_no_file_makes_room_for_one(tmp_path: Path, damage: str) -> None:
    left(tmp_path, 6)
    (tmp_path / "log").touch()
    DAMAGES[damage](tmp_path / "log")
    found, _ = resumes(tmp_path)
    assert found
    folder = RunFolder(tmp_path, RunRecord("x", "running"))
    folder.start()
    folder.resume(found)
    folder.accept()
    assert not (tmp_path / "log").exists()


class Evil:
    """What a pickle can do."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("exit 7",)


def edited(path: Path) -> None:
    """Other weights under the description of a run."""
    with zipfile.ZipFile(path) as file:
        members = {member: file.read(member) for member in file.namelist()}
    members["archive/data/0"] = bytes(len(members["archive/data/0"]))
    with zipfile.ZipFile(path, "w") as file:
        for name, data in members.items():
            file.writestr(name, data)


def foreign(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("weights", b"1" * 1000)


SPOILED: dict[str, Callable[[Path], None]] = DAMAGES | {
    "a zip of something else": foreign,
    "a checkpoint of something else": lambda path: torch.save({"model": torch.ones(3)}, path),
    "a pickle that runs code": lambda path: torch.save({"model": Evil()}, path),
    "weights that were edited": edited,
    "that of other steps": lambda path: shutil.copy(place(path.parents[1], 4), path) and None,
}


@pytest.mark.parametrize("damage", sorted(SPOILED.keys() - {"gone"}))
def test_a_checkpoint_that_cannot_be_used_is_skipped(tmp_path: Path, damage: str) -> None:
    SPOILED[damage](place(left(tmp_path, 4, 6), 6))
    found, said = resumes(tmp_path)
    assert found and (found.step, found.unusable) == (4, (6,))
    (note,) = said
    assert str(place(tmp_path, 6)) in note and "weights_only" not in note
    place(tmp_path, 4).unlink()
    assert resumes(tmp_path)[0] is None


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
