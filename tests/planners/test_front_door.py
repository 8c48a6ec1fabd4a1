"""Planners of matmuls as a user meets them: `python run.py mode=plan planner=...`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import run
from harness.cli.compose import compose
from harness.config.overrides import quoted
from harness.core.plan import Plan
from harness.core.problem import CannotRun, Problem, advice
from harness.run import runner
from tests.harness.sbp.nets import dense, transformer

FLAT = ["cluster=flat", "cluster.devices=8", "cluster.alpha_s=1e-5", "cluster.bandwidth_gb_s=10", "tracker=none"]
ISSUED = (32768, 16384, 4096, 2048, 512)


@pytest.fixture
def start(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Runs with a stored profile, from whose folder it writes; gives exit code, stdout and stderr."""

    def started(profile, *typed: str, mode: str = "plan") -> tuple[int, str, str]:
        profile.save(tmp_path / "p.json")
        given = [f"mode={mode}", quoted("profile", str(tmp_path / "p.json")), quoted("out", str(tmp_path / "run"))]
        code = run.main([*given, *FLAT, *typed], {})
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return started


@pytest.fixture
def refusal(tmp_path: Path):
    """Runs what cannot run, with a stored profile; gives its problems."""

    def problems(profile, *typed: str, mode: str = "plan") -> list[Problem]:
        profile.save(tmp_path / "p.json")
        given = [f"mode={mode}", quoted("profile", str(tmp_path / "p.json")), quoted("out", str(tmp_path / "run"))]
        keys = [*given, *FLAT, *typed]
        try:
            return list(runner.run(compose(keys), keys).problems)
        except CannotRun as error:
            return list(error.problems)

    return problems


@pytest.mark.usefixtures("computation")
@pytest.mark.parametrize(
    ("planner", "seconds", "close"),
    [
        (["planner=autoddl", "planner.paths=paper"], 0.0046586752, 1e-9),
        (["planner=autoddl", "planner.paths=mixed"], 0.0038338, 1e-5),
        (["planner=autoddl", "planner.paths=paper", "planner.search=coordinate_descent"], 0.0046586752, 0.1),
        (["planner=megatron"], 0.0156, 0.01),
        (["planner=data_parallel"], 2 * 4095 * (4 * 1e-5 + 4 * 613_416_960 / 4096 * 1e-10), 1e-9),
    ],
    ids=["paper", "mixed", "coordinate descent", "megatron", "data parallel"],
)
def test_a_network_of_dense_layers_on_4096_devices(start, tmp_path: Path, planner, seconds, close):
    code, out, err = start(dense(ISSUED, 8192), *planner, "cluster.devices=4096")
    assert code == 0, err
    plan = Plan.load(tmp_path / "run" / "plan.json")
    assert plan.predicted["communication_s"] == pytest.approx(seconds, rel=close)
    assert plan.predicted["step_time_s"] == pytest.approx(plan.predicted["communication_s"])
    assert "layers take no time" in out and "those of this machine" not in out
    (stage,) = [line.split() for line in out.splitlines() if line.startswith("    0 ")]
    assert stage[-2:] == ["-", "-"], "no times are shown where there are none"
    assert [line.split()[0] for line in out.splitlines() if line.startswith("linear_")] == list(plan.strategy)
    assert {"megatron", "data_parallel"} <= {line.split()[0] for line in out.splitlines() if line.strip()}


def test_the_record_has_the_strategies_and_what_others_would_take(start, tmp_path: Path):
    assert start(transformer(), "planner=autoddl")[0] == 0
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["status"] == "ok"
    assert set(record["plan"]["strategy"]) == set(record["predicted"]["products"])
    assert set(record["predicted"]["baselines"]) == {"megatron", "data_parallel"}
    assert record["manifest"]["simulation"]["costs"] == "none"


@pytest.mark.parametrize(
    ("profile", "typed", "key", "value", "advised"),
    [
        (dense((30, 20, 10), 3), ["planner=autoddl", "cluster.devices=7"],
         "mesh.tensor", 7, "batch.size=7, or mesh.tensor=6"),
        (transformer(heads=3, hidden=48, samples=1), ["planner=autoddl", "cluster.devices=4"],
         "mesh.tensor", 4, "batch.size=4, or mesh.tensor=1 mesh.data=1"),
        (dense((30, 20, 10), 1), ["planner=autoddl", "cluster.devices=7", "batch.micro_batches=14"],
         "mesh.tensor", 7, "batch.micro_batches=2, or batch.size=98"),
        (dense((64, 128, 32), 12), ["planner=data_parallel"],
         "mesh.tensor", 8, "batch.size=16, or mesh.tensor=6"),
        (transformer(), ["planner=autoddl", "planner.memory_gb=1e-6"],
         "planner.memory_gb", 1e-6, "planner.memory_gb=0.0006647, or more devices"),
        (transformer(), ["planner=autoddl", "planner.search=exhaustive"],
         "planner.search", "exhaustive", "planner.search=exact"),
        (transformer(), ["planner=autoddl", "mesh.tensor=16"], "mesh.tensor", 16, "mesh.tensor=8"),
        (transformer(), ["planner=autoddl", "mesh.tensor=6", "cluster.devices=4", "cluster.nodes=2"],
         "mesh.tensor", 6, "mesh.tensor=2"),
        (transformer(), ["planner=autoddl", "engine=gpipe"], "planner", "autoddl", "planner=balance, or engine=sbp"),
        (transformer(), ["planner=autoddl", "planner.paths=short"], "planner.paths", "short", "planner.paths=mixed"),
        (transformer(), ["planner=strategies", "planner.strategies=[*:2x2]"],
         "planner.strategies", "*:2x2", "planner.strategies=[*.qkv:1x2x1,*:1x1x2]"),
        (dense((64, 128, 32)), ["planner=strategies", "planner.strategies=[linear_0:8x1x1]"],
         "planner.strategies", None, "planner.strategies=[linear_0:8x1x1,*:8x1x1]"),
    ],
    ids=["factorization", "heads", "micro-batches", "data parallel", "memory", "exhaustive", "devices", "nodes",
         "gpipe", "paths", "pattern", "no strategy"],
)  # fmt: skip
def test_what_prevents_a_plan_is_reported_in_the_users_keys_with_fixes(refusal, profile, typed, key, value, advised):
    (problem,) = refusal(profile, *typed)
    assert (problem.key, problem.value, advice(problem)) == (key, value, advised)


def test_an_engine_of_strategies_has_no_use_for_stages_alone(refusal):
    (problem,) = refusal(dense((64, 128, 32), 64, seconds=1e-3), "engine=sbp", "planner=balance")
    assert (problem.key, problem.value) == ("engine", "sbp")
    assert {"planner": "autoddl"} in problem.fixes and len(problem.fixes) > 1


@pytest.mark.parametrize(
    ("typed", "key", "value", "fix"),
    [
        (["planner=autoddl", "planner.paths=paper"], "planner.paths", "paper", {"planner.paths": "mixed"}),
        (["planner=autoddl", "planner.splits=any"], "planner.splits", "any", {"planner.splits": "even"}),
        (["planner=megatron", "planner.padded=true"], "planner.padded", True, {"planner.padded": False}),
        (["planner=summa", "planner.padded=true"], "planner.padded", True, {"planner.padded": False}),
    ],
)
def test_cost_models_are_planned_and_simulated_and_not_run(start, refusal, typed, key, value, fix):
    profile = dense((64, 128, 32), 64, seconds=1e-3)
    problems = refusal(profile, *typed, "model=mlp", mode="run")
    (found,) = [one for one in problems if one.key == key]
    assert (found.value, found.fixes) == (value, (fix, {"mode": "plan"}))
    for mode in ("plan", "simulate"):
        code, out, err = start(profile, *typed, mode=mode)
        assert code == 0, err
        assert "data_parallel" in out
