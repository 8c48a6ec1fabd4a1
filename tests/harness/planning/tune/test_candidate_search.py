"""`mode=tune`: the choice against a search by simulation alone; what it leaves after; what it refuses."""

from __future__ import annotations

import csv
import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig

from harness.cli.compose import compose
from harness.config import cluster_config
from harness.config.cluster_config import ClusterConfig
from harness.config.overrides import quoted
from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan
from harness.core.problem import CannotRun, Problem, apply
from harness.core.products import Product
from harness.core.record import RunRecord
from harness.planning import profiles
from harness.planning.draft import Draft, Layout
from harness.planning.prepare import Ground
from harness.planning.tune import outcome
from harness.planning.tune.candidate_search import Tuner
from harness.planning.tune.candidates import Candidate
from harness.planning.tune.result import TITLES, Line
from harness.report.progress import Progress
from harness.run import runner
from harness.worker import profile_tasks
from tests.harness.planning.tune.nets import FLAT, LAYERS, Bench, Nets, net, tuned
from tests.problems import refused, row, rows


@pytest.mark.usefixtures("computation", "at_length")
@settings(max_examples=8)
@given(
    forward_s=st.lists(st.floats(1e-4, 1e-2), min_size=8, max_size=8),
    size=st.sampled_from([10**5, 10**6, 10**7, 3 * 10**7]),
    engine=st.sampled_from([["engine=myelin"], ["engine=deepspeed", "engine.zero=1"]]),
)
def test_the_choice_is_the_best_by_simulation(
    forward_s: list[float], size: int, engine: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Exactly, of what was simulated; of all candidates within 2 %."""
    found = tuned(tmp_path_factory.mktemp("run"), *engine, "batch.size=32", forward_s=forward_s, size=size)
    bench, simulated = Bench(*FLAT, *engine, "batch.size=32"), {}
    bench.cluster = cluster_config.build(ClusterConfig(**bench.config.cluster))
    for line in found.lines:
        if line.candidate.uneven() or line.candidate.mesh.tensor > 1 or line.slower:
            continue
        try:
            draft = bench.draft(line.candidate, net(forward_s, line.candidate.micro_batch, size))
        except CannotRun:
            continue
        if bench.fits(draft):
            simulated[line.candidate] = draft.plan.predicted["step_time_s"]
    few = {line.candidate: line.simulated_step_time_s for line in found.simulated}
    assert few == pytest.approx({one: simulated[one] for one in few})
    assert few[found.best.candidate] == min(few.values()) <= 1.02 * min(simulated.values())


def test_what_the_simulator_refuses_gives_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first three do not fit: the next ones are simulated in their place."""
    refused: list[Candidate] = []

    class Strict(Nets):
        def simulation(self, line: Line, best_s: float = 0.0) -> tuple[Line, Draft | None]:
            if len(refused) < 3:
                refused.append(line.candidate)
                return replace(line, problems=(Problem("cluster.memory_gb", 1, "is too small"),)), None
            return super().simulation(line, best_s)

    overrides = ["mode=tune", *FLAT, "engine=myelin", "batch.size=32"]
    found = Strict(compose(overrides), overrides, tmp_path, Progress()).search()
    assert len(refused) == 3 and found.simulated
    assert not {line.candidate for line in found.simulated} & {*refused}
    assert {line.candidate: line.out for line in found.lines}[refused[0]] == "cluster.memory_gb 1 is too small"


def test_each_candidate_is_planned_once(tmp_path: Path) -> None:
    planned: list[Candidate] = []

    class Counting(Nets):
        def layout(self, one: Candidate) -> Layout:
            planned.append(one)
            return super().layout(one)

    overrides = ["mode=tune", *FLAT, "engine=myelin", "batch.size=32"]
    found = Counting(compose(overrides), overrides, tmp_path, Progress()).search()
    assert len(planned) == len(set(planned)) >= len(found.simulated) >= len(found.kinds)


def test_what_an_engine_does_not_keep_needs_no_memory(tmp_path: Path) -> None:
    """Autocast's copies of weights are all that the profile has for the backward pass, and fsdp's policy keeps none."""

    class Copied(Nets):
        def ground(self, one: Candidate, ahead: Sequence[DictConfig]) -> Ground:
            found, product = super().ground(one, ahead), Product("up", weight_bytes=10**6)
            layers = [replace(layer, saved_bytes=10**6 // 2, products=(product,)) for layer in found.profile.layers]
            return replace(found, profile=replace(found.profile, layers=tuple(layers), autocast="bfloat16"))

    overrides = ["mode=tune", *FLAT, "engine=fsdp", "precision=mixed", "engine.mixed_precision=policy", "batch.size=32"]
    tuner = Copied(compose(overrides), overrides, tmp_path, Progress())
    simulated = {line.candidate: line.simulated_memory_bytes for line in tuner.search().simulated}
    least = {one: tuner.with_state(Line(one)).closed_form_memory_bytes for one in simulated}
    assert simulated and all((least[one] or 0) <= (size or 0) for one, size in simulated.items())


def test_replicas_that_some_nodes_cannot_hold_are_not_planned(tmp_path: Path) -> None:
    """Of three devices on nodes of four: two replicas would be on both nodes."""
    planned: list[Candidate] = []

    class Counting(Nets):
        def layout(self, one: Candidate) -> Layout:
            planned.append(one)
            return super().layout(one)

    overrides = ["mode=tune", *FLAT, "engine=myelin", "batch.size=24", "mesh.pipeline=3", "mesh.data=2"]
    with pytest.raises(CannotRun, match="on nodes of 4 devices some replicas would span two nodes"):
        Counting(compose(overrides), overrides, tmp_path, Progress()).search()
    assert not planned


def test_plans_that_are_slower_get_no_estimate(tmp_path: Path) -> None:
    """They wait in the queue by a bound of their plan, until a few that are faster have been simulated."""
    timed: list[Candidate] = []

    class Counting(Nets):
        def timed(self, line: Line) -> Line:
            timed.append(line.candidate)
            return super().timed(line)

    overrides = ["mode=tune", *FLAT, "engine=myelin", "batch.size=64"]
    tuner = Counting(compose(overrides), overrides, tmp_path, Progress())
    found = tuner.search()
    left = [line for line in found.lines if line.candidate in tuner.layouts and not line.out]
    assert len(timed) == len(set(timed)) < len(left)
    assert {line.candidate for line in found.simulated} <= {*timed}


@pytest.mark.usefixtures("computation")
def test_more_memory_brings_larger_micro_batches(tmp_path: Path) -> None:
    wide = tuned(tmp_path, "engine=myelin", "batch.size=64", "cluster.memory_gb=1", size=2 * 10**7)
    narrow = tuned(tmp_path, "engine=myelin", "batch.size=64", "cluster.memory_gb=0.3", size=2 * 10**7)
    assert narrow.best.candidate.micro_batch <= wide.best.candidate.micro_batch
    assert narrow.layout.plan.predicted["step_time_s"] > wide.layout.plan.predicted["step_time_s"]
    full = [line for line in narrow.lines if line.full]
    assert full and all(line.simulated_step_time_s is None or line.simulated_memory_bytes > 3e8 for line in full)
    assert any(line.problems[0].numbers.get("available_bytes") == 3e8 for line in full)


def test_what_is_given_stays(tmp_path: Path) -> None:
    found = tuned(tmp_path, "engine=myelin", "batch.size=64", "mesh.data=4", "batch.micro_batches=8")
    assert found.layout.plan.mesh.data == 4 and found.layout.plan.micro_batches == 8
    assert {(line.candidate.mesh.data, line.candidate.micro_batch) for line in found.lines} == {(4, 2)}
    fixed = tuned(
        tmp_path, "engine=deepspeed", "batch.size=64", "engine.zero=1", "engine.checkpoint=never", "mesh.data=2"
    )
    assert {key for line in fixed.lines for key, _ in line.candidate.settings} == {"planner", "planner.by"}
    assert all("engine.zero=1" in one.command and "mesh.data=2" in one.command for one in fixed.kinds)


def test_equal_plans_are_one_row(tmp_path: Path) -> None:
    """Stages of equal memory may be those of equal time: of rows that look the same the one with fewer keys stays."""
    found = tuned(tmp_path, "engine=myelin", "batch.size=64", "mesh.data=4", "batch.micro_batches=8")
    one = found.rows[0]
    same, slower = replace(one, overrides=(*one.overrides, "planner.by=memory")), replace(one, step_time_s=1e9)
    tuner: Any = SimpleNamespace(rows=[slower, same, one])
    assert outcome._rows(tuner) == (one, slower)


def test_what_fills_the_fullest_device_is_said(tmp_path: Path) -> None:
    with pytest.raises(CannotRun) as error:
        tuned(tmp_path, "engine=ddp", "cluster.memory_gb=0.1", size=10**7)
    (problem,) = error.value.problems
    assert "76.3 MiB of weights, 76.3 MiB of gradients" in problem.message


def test_an_interrupted_search_returns_what_it_has_found(tmp_path: Path) -> None:
    class Impatient(Nets):
        def simulation(self, line: Line, best_s: float = 0.0) -> tuple[Line, Draft | None]:
            if self.best:
                raise KeyboardInterrupt
            return super().simulation(line, best_s)

    overrides = ["mode=tune", *FLAT, "engine=myelin", "batch.size=32"]
    found = Impatient(compose(overrides), overrides, tmp_path, Progress()).search()
    assert found.interrupted and len(found.simulated) == 1 == len(found.rows)
    assert found.command.startswith("python run.py mode=simulate")


def test_nothing_fits(tmp_path: Path) -> None:
    with pytest.raises(CannotRun) as error:
        tuned(tmp_path, "engine=myelin", "cluster.memory_gb=0.01", size=10**7)
    (problem,) = error.value.problems
    assert (problem.key, problem.value) == ("cluster.memory_gb", 0.01)
    assert problem.numbers["needed_bytes"] > problem.numbers["available_bytes"] == 10**7
    assert "mesh.tensor=1 mesh.pipeline=8" in problem.message
    rows = [*csv.DictReader((tmp_path / "tune.csv").open())]
    assert rows and all(row["out"] for row in rows)


PROFILE = net(LAYERS, 2, 10**7)


@pytest.fixture
def file(tmp_path: Path) -> str:
    PROFILE.save(tmp_path / "p.json")
    return quoted("profile", str(tmp_path / "p.json"))


def problems(folder: Path, *typed: str) -> list[Problem]:
    """Those of a search that finds nothing."""
    overrides = ["mode=tune", *FLAT, *typed]
    folder.mkdir()
    with pytest.raises(CannotRun) as caught:
        Tuner(compose(overrides), overrides, folder, Progress()).search()
    return refused(caught)


def run(folder: Path, *typed: str) -> RunRecord:
    overrides = ["mode=tune", *FLAT, *typed, "tracker=none", quoted("out", str(folder))]
    return runner.run(compose(overrides), overrides)


def test_a_run_leaves_its_choice(tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    record = run(folder, file, "engine=myelin", "batch.size=64", "costs=measured")
    assert (record.status, record.source) == ("ok", "simulated"), record.reason
    assert {path.name for path in folder.iterdir()} == {
        ".lock", "config.yaml", "record.json", "plan.json", "profile.json", "tune.csv"
    }  # fmt: skip
    chosen, plan = record.metrics["tuned"], Plan.load(folder / "plan.json")
    assert (chosen["micro_batch"], chosen["tensor"]) == (2, 1)
    assert (chosen["pipeline"], chosen["data"]) == (plan.mesh.pipeline, plan.mesh.data)
    assert record.metrics["step_time_s"] == plan.predicted["step_time_s"]
    assert ModelProfile.load(folder / "profile.json").layers == PROFILE.layers
    rows = [*csv.DictReader((folder / "tune.csv").open())]
    assert tuple(rows[0]) == TITLES and len(rows) == chosen["candidates"]
    times = [float(row["simulated_step_time_s"]) for row in rows if row["simulated_step_time_s"]]
    assert min(times) == record.metrics["step_time_s"]
    reported = capsys.readouterr().out.splitlines()
    assert reported[-1] == chosen["command"]
    again = [*shlex.split(chosen["command"])[2:], quoted("out", str(tmp_path / "again"))]
    simulated = runner.run(compose(again), again)
    assert simulated.metrics["step_time_s"] == pytest.approx(record.metrics["step_time_s"])
    assert simulated.metrics["peak_memory_bytes"] == record.metrics["peak_memory_bytes"]


@pytest.mark.usefixtures("computation")
def test_nothing_fits_and_what_helps(tmp_path: Path, file: str) -> None:
    typed = [file, "engine=myelin", "cluster.memory_gb=0.12", "batch.size=64", "optimizer.name=adam"]
    assert run(tmp_path / "a", *typed).status == "infeasible"
    (problem,) = problems(tmp_path / "c", *typed)
    assert (problem.key, problem.value) == ("cluster.memory_gb", 0.12)
    assert problem.numbers["needed_bytes"] > problem.numbers["available_bytes"] == 1.2e8
    assert len(problem.fixes) == 2 and [*problem.fixes[1]] == ["cluster.memory_gb"]
    for fix in problem.fixes:
        more = run(tmp_path / "b", *apply(typed, fix))
        assert more.status == "ok", (fix, more.reason)


def test_settings_of_the_best_one_that_do_nothing_are_noted(
    tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "run", file, "engine=myelin", "batch.size=64", "mesh.pipeline=2", "engine.order=1f1b",
        "engine.policy=backward_first")  # fmt: skip
    assert "note: engine.policy backward_first   does nothing" in capsys.readouterr().out


@pytest.mark.parametrize("engine", ["pipeline", "deepspeed"])
def test_float16_whose_losses_nobody_scales_is_noted_as_a_run_does(engine: str, tmp_path: Path) -> None:
    found = tuned(tmp_path, f"engine={engine}", "precision.autocast=float16", "mesh.pipeline=2")
    assert ("precision.autocast", "float16", ["precision.autocast=bfloat16"]) in rows(found.notes)


def test_it_says_why_nothing_is_possible(tmp_path: Path, file: str) -> None:
    assert run(tmp_path / "a", file, "engine=myelin", "batch.size=7").status == "infeasible"
    assert rows(problems(tmp_path / "c", file, "engine=myelin", "batch.size=7")) == [
        ("batch.size", 7, ["batch.size=8"]),
    ]
    typed = [file, "precision=fp64", "optimizer.name=adam", "engine=ddp", "mesh.pipeline=2"]
    assert rows(problems(tmp_path / "b", *typed)) == [("mesh.pipeline", 2, ["mesh.pipeline=1"])]


@pytest.mark.usefixtures("computation")
@pytest.mark.parametrize(
    ("typed", "key", "fixes"),
    [
        (
            "engine=ddp batch.size=64 batch.micro_batches=5",
            "batch.micro_batches",
            ["batch.micro_batches=4", "batch.micro_batches=8"],
        ),
        (
            "engine=myelin batch.micro_batches=3",
            "batch.micro_batches",
            ["batch.micro_batches=4", "batch.micro_batches=2"],
        ),
        ("engine=myelin batch.micro_batches=300", "batch.micro_batches", ["batch.micro_batches=16"]),
        ("engine=myelin mesh.pipeline=16 cluster.nodes=4", "mesh.pipeline", ["mesh.pipeline=8"]),
        ("engine=ddp cluster.nodes=1 cluster.devices=2 mesh.data=3", "mesh.data", ["mesh.data=2"]),
    ],
)
def test_what_is_not_possible_has_a_fix_that_is(typed: str, key: str, fixes: list[str], tmp_path: Path) -> None:
    """The user's own key and value; what is offered is searched with, and stays what was given."""
    with pytest.raises(CannotRun) as error:
        tuned(tmp_path, *typed.split())
    problem = error.value.problems[0]
    assert str(error.value).startswith(f"{typed.split()[0]} model=unet cluster=flat cannot run:")
    assert row(problem)[::2] == (key, fixes)
    for changed in fixes:
        found = tuned(tmp_path, *typed.split(), changed)
        if "micro_batches=" in typed:
            given = int((changed if "micro_batches=" in changed else typed).rpartition("micro_batches=")[2])
            assert {line.candidate.micro_batches for line in found.lines} == {given}


@pytest.mark.usefixtures("computation")
@pytest.mark.usefixtures("at_length")
def test_without_a_planner_that_splits_matmuls_there_are_no_shards(tmp_path: Path) -> None:
    found = tuned(tmp_path, "engine=deepspeed", "cluster.memory_gb=0.05", size=10**6)
    assert {line.candidate.mesh.tensor for line in found.lines if not line.out} == {1}
    out = [line for line in found.lines if line.candidate.mesh.tensor > 1]
    assert out and {dict(line.candidate.settings)["planner"] for line in out} == {"megatron"}
    alone = tuned(tmp_path, "engine=deepspeed", "planner=balance", "cluster.memory_gb=0.05", size=10**6)
    assert {line.candidate.mesh.tensor for line in alone.lines} == {1}
    with pytest.raises(CannotRun, match="how 2 devices split each matmul"):
        tuned(tmp_path, "engine=deepspeed", "planner=balance", "mesh.tensor=2")


@pytest.mark.usefixtures("computation", "at_length")
@pytest.mark.parametrize("memory_gb", [0.01, 0.03])
@pytest.mark.parametrize("planner", ["balance", "madpipe", "deepspeed"])
def test_memory_that_the_user_gave_has_a_fix(planner: str, memory_gb: float, tmp_path: Path, file: str) -> None:
    typed = [file, "engine=myelin", f"planner={planner}", f"cluster.memory_gb={memory_gb}", "batch.size=64"]
    (problem,) = problems(tmp_path / "a", *typed)
    assert (problem.key, problem.value) == ("cluster.memory_gb", memory_gb)
    assert problem.numbers["available_bytes"] == memory_gb * 1e9
    *_, fix = problem.fixes
    assert fix["cluster.memory_gb"] > memory_gb
    again = run(tmp_path / "b", *apply(typed, fix))
    assert again.status == "ok", again.reason


def test_the_number_of_micro_batches_and_a_profile_must_agree(tmp_path: Path, file: str) -> None:
    found = problems(tmp_path / "a", file, "engine=ddp", "batch.size=64", "batch.micro_batches=8")
    assert found[0].key == "profile" and found[0].fixes[0] == {"batch.micro_batches": 4}
    assert run(tmp_path / "b", file, "engine=ddp", "batch.size=64", "batch.micro_batches=4").status == "ok"


@pytest.mark.usefixtures("computation")
@pytest.mark.usefixtures("at_length")
def test_the_sweep_of_table_2(tmp_path: Path) -> None:
    """Its points at the paper's size, without the search: what each asks is allowed."""
    from harness.sweep.points import expand

    points = expand(["+sweeps=myelin_table2", "scale=paper"])
    assert len(points) == 12
    for point in points:
        config = compose(point.overrides)
        assert config.mode == "tune" and config.batch.size == 16384 and config.mesh.data is None
    assert len(expand(["+sweeps=myelin_table2", "scale=local"])) == 3


def test_the_record_is_json(tmp_path: Path, file: str) -> None:
    run(tmp_path / "run", file, "engine=single", "cluster.nodes=1", "cluster.devices=1", "batch.size=64")
    stored = json.loads((tmp_path / "run" / "record.json").read_text())
    assert stored["metrics"]["tuned"]["micro_batches"] == 32 and stored["manifest"]["simulation"]["cluster"]


def test_one_process_makes_the_profiles_of_all_micro_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading torch takes longer than profiling a small model."""
    started = []

    def in_this_process(folder: Path, title: str, timeout_s: float, action: str, *sizes: str) -> None:
        started.append(sizes)
        profile_tasks.count_model(folder, config, *sizes)

    monkeypatch.setenv("REGATTA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(profiles.supervisor, "run_worker", in_this_process)
    monkeypatch.setattr(profile_tasks, "QUICK_S", 1000.0)
    overrides = ["mode=tune", "engine=gpipe", "model=mlp", "cluster=p40x8", "cluster.devices=2", "batch.size=8"]
    config = compose(overrides)
    found = Tuner(config, overrides, tmp_path, Progress()).search()
    assert [sizes[0] for sizes in started] == ["1"]
    assert {line.candidate.micro_batch for line in found.lines if not line.out} == {1, 2, 4, 8}
