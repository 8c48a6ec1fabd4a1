"""From where a run resumes in its folder, and when not: without any training."""

from __future__ import annotations

import json
import os
import random
import shutil
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
from harness.interfaces import BatchShape, PlanRequest
from harness.run.checkpoint_files import RunState, place, steps, write
from harness.run.resume import Resumed, SamePlan, find_finished, find_resumable, refuse_to_replace, say_what_is_replaced
from harness.run.run_folder import RunFolder, has_trained
from tests.problems import refused, row
from tests.support.run_folders import TYPED, contents, replaced

PLAN = Plan.contiguous([2, 2], 2)


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


def test_a_degree_that_was_derived_is_that_of_the_plan(tmp_path: Path) -> None:
    """What is refused has the value that it had, and the same degree, now given, is no other run."""
    typed = [text for text in TYPED if not text.startswith("mesh.")]
    folder = left(tmp_path, 6, typed=typed)
    sizes = PLAN.mesh
    assert resumes(folder, f"mesh.pipeline={sizes.pipeline}", f"mesh.data={sizes.data}", typed=typed)[0]
    with pytest.raises(CannotRun) as caught:
        resumes(folder, "mesh.data=7", typed=typed)
    assert f"with mesh.data {sizes.data} (here 7)" in refused(caught)[0].message


@pytest.mark.parametrize("samples", [1, 2])
def test_samples_of_a_micro_batch_are_another_name_of_their_number(tmp_path: Path, samples: int) -> None:
    typed = [text for text in TYPED if not text.startswith("batch.micro_")]
    folder = left(tmp_path, 6, typed=[*typed, "batch.size=16", "batch.micro_batches=4"])
    now = [*typed, "batch.size=16", f"batch.micro_batch_size={samples}"]
    if samples == 2:
        assert resumes(folder, typed=now)[0]
        return
    with pytest.raises(CannotRun) as caught:
        resumes(folder, typed=now)
    assert "with batch.micro_batches 4 (here 8) " in refused(caught)[0].message + " "


@pytest.mark.parametrize(
    ("differs", "named"),
    [
        (["seed=1"], ["seed 0 (here 1)"]),
        (["optimizer.lr=0.5"], ["optimizer.lr 0.001 (here 0.5)"]),
        (["warmup=1"], ["warmup 2 (here 1)"]),
        (["steps=3"], ["after 6 steps", "steps 10 (here 3)"]),
        (["engine=single", "mesh.data=1"], ["with engine ddp (here single), mesh.data 2 (here 1)"]),
        (["model=gpt", "data=synthetic"], ["with model mlp (here gpt)"]),
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
