"""What a search over many candidates does once, or leaves out; that it finds the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.checks import engine_support
from harness.cli.compose import compose
from harness.core.plan import Plan
from harness.core.problem import CannotRun, Problem
from harness.planning import draft, profiles
from harness.planning.tune import extrapolate, step_time
from harness.report.progress import Progress
from harness.run import runner
from harness.sbp import baselines
from harness.sbp.memory_limit import TooLarge, held
from harness.sbp.shortest_path import Infeasible
from harness.sbp.strategy_costs import INFINITE, Rules
from harness.schedule import Schedule
from planners import tensor_parallel_base
from planners.autoddl.planner import AutoDDL, Config
from tests.harness.planning.tune.nets import FLAT, Nets
from tests.harness.sbp.nets import transformer
from tests.planners.tensor_parallel_cases import ADAM, cluster, request
from tests.problems import refused


class Counting:
    """A function, and how often it was called."""

    def __init__(self, function) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *args, **more):
        self.calls += 1
        return self.function(*args, **more)


def counted(monkeypatch: pytest.MonkeyPatch, place, name: str) -> Counting:
    counting = Counting(getattr(place, name))
    monkeypatch.setattr(place, name, counting)
    return counting


@pytest.mark.parametrize("typed", [["precision=fp16"], ["precision=fp16", "optimizer.name=nadam"]])
def test_a_scheme_that_no_mesh_helps_is_asked_once(
    typed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = counted(monkeypatch, engine_support, "early")
    overrides = ["mode=tune", *FLAT, "engine=pipeline", "batch.size=64", *typed]
    search = Nets(compose(overrides), overrides, tmp_path, Progress())
    with pytest.raises(CannotRun) as caught:
        search.search()
    found = refused(caught)
    alone = engine_support.early(
        compose([*overrides, "mesh.pipeline=2", "mesh.data=4"]), search.schemes[0].engine, None
    )
    assert {one.key for one in found} == {one.key for one in alone}
    assert f"none of the {len(search.lines)} candidates is possible" in found[0].message
    assert early.calls - 1 <= 5 * len(search.schemes) < len(search.lines)


def test_a_scheme_that_some_meshes_do_not_allow_is_asked_about_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = counted(monkeypatch, engine_support, "early")
    overrides = ["mode=tune", *FLAT, "engine=torch_pipelining", "engine.schedule=interleaved1f1b", "batch.size=24"]
    search = Nets(compose(overrides), overrides, tmp_path, Progress())
    assert search.search().best.candidate.mesh.size > 1
    assert not search.on_any_mesh and early.calls > len(search.schemes)


def test_a_few_micro_batches_are_validated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A step of many has the same builder; and so do steps that differ in their bytes alone."""
    monkeypatch.setattr(extrapolate, "WHOLE", 1)
    validated, simulated = counted(monkeypatch, draft, "validation_errors"), counted(monkeypatch, draft, "simulate")
    overrides = ["mode=tune", *FLAT, "engine=myelin", "batch.size=64", "mesh.pipeline=4", "batch.micro_batch_size=1"]
    Nets(compose(overrides), overrides, tmp_path, Progress()).search()
    assert 0 < validated.calls < simulated.calls <= 3 * validated.calls


def test_what_a_search_validates_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fault = Problem("0F0 of stage 0", None, "waits for itself")
    monkeypatch.setattr(draft, "validation_errors", lambda *_: [fault])
    simulated = counted(monkeypatch, draft, "simulate")
    overrides = ["mode=tune", *FLAT, "engine=myelin", "batch.size=64", "mesh.pipeline=4", "batch.micro_batch_size=1"]
    with pytest.raises(CannotRun, match="0F0 of stage 0"):
        Nets(compose(overrides), overrides, tmp_path, Progress()).search()
    assert not simulated.calls


def test_the_fastest_is_validated_with_all_of_its_micro_batches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A builder that is wrong for many alone; before, each candidate that was simulated was refused then."""
    of_all = draft.validation_errors
    fault = Problem("0F31 of stage 0", None, "has no 0B31")

    def wrong(schedule: Schedule, plan: Plan) -> list[Problem]:
        return [fault] if plan.micro_batches > 8 else list(of_all(schedule, plan))

    monkeypatch.setattr(draft, "validation_errors", wrong)
    overrides = ["mode=tune", *FLAT, "engine=myelin", "batch.size=64", "mesh.pipeline=4", "batch.micro_batch_size=1"]
    with pytest.raises(CannotRun, match="0F31 of stage 0"):
        Nets(compose(overrides), overrides, tmp_path, Progress()).search()


def test_equal_plans_of_several_schemes_are_simulated_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Equal layers are cut equal, whatever is balanced; each candidate has its figures."""
    simulated, estimated = counted(monkeypatch, draft, "simulate"), counted(monkeypatch, step_time, "without_sharing")
    overrides = ["mode=tune", *FLAT, "engine=pipeline", "engine.schedule=1f1b", "batch.size=64", "mesh.pipeline=4"]
    overrides += ["engine.checkpoint=never", "batch.micro_batch_size=1"]
    one = type("Even", (Nets,), {"forward_s": [1e-3] * 8})(compose(overrides), overrides, tmp_path, Progress())
    found = {(line.candidate.mesh, line.candidate.settings): line for line in one.search().simulated}
    assert 0 < 2 * simulated.calls == len(found)
    assert simulated.calls <= estimated.calls < len(found)
    for (mesh, settings), line in found.items():
        other = found[mesh, () if settings else (("planner.by", "memory"),)]
        assert line.simulated_step_time_s == other.simulated_step_time_s
        assert line.closed_form_step_time_s == other.closed_form_step_time_s
        assert line.simulated_memory_bytes == other.simulated_memory_bytes


def test_the_plan_that_is_returned_alone_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = counted(monkeypatch, tensor_parallel_base, "compare_baselines")
    profile = replace(transformer(samples=8, hidden=64), micro_batch=8)
    monkeypatch.setattr(profiles, "origin", lambda *given: "computed")
    overrides = ["mode=tune", *FLAT, "engine=sbp", "batch.size=64", "mesh.tensor=4", f"out={tmp_path / 'tuned'}"]
    profile.save(tmp_path / "p.json")
    record = runner.run(compose([*overrides, f"profile={tmp_path / 'p.json'}"]), overrides)
    assert record.status == "ok", record.reason
    assert compared.calls == 1 < record.metrics["tuned"]["candidates"]
    plan = Plan.load(tmp_path / "tuned" / "plan.json")
    assert set(plan.predicted["baselines"]) == {"megatron", "data_parallel"}
    assert plan.predicted["step_time_s"] == record.metrics["step_time_s"]


def test_a_request_may_do_without_baselines() -> None:
    profile, there = transformer(), cluster(8)
    planner = AutoDDL(Config())
    asked = request(profile, 8)
    whole, short = (planner.plan(profile, there, ADAM, replace(asked, compares=one)) for one in (True, False))
    assert "baselines" in whole.predicted and "baselines" not in short.predicted
    assert short == replace(whole, predicted={k: v for k, v in whole.predicted.items() if k != "baselines"})


@pytest.mark.parametrize("routes", [baselines.megatron, baselines.data_parallel, baselines.summa])
@pytest.mark.parametrize("local", [1, 4])
def test_routes_that_were_made_once_are_those_of_each_limit(routes, local: int) -> None:
    """Of what is made without a limit of exchanges the same is left as where each is made with the limit."""
    profile = transformer(samples=64, hidden=128)
    problem = tensor_parallel_base.split_problem(profile, cluster(8, local), ADAM, request(profile), Rules())
    for share in (2.0, 1.0, 0.7, 0.5, 0.3, 0.2, 0.1, 0.02):
        rules = replace(problem.costs.rules, exchange_bytes=share * problem._largest_exchange)
        costs = replace(problem.costs, rules=rules)
        try:
            made = routes(problem.chain, costs, "free")
        except Infeasible:
            made = []
        if not made:
            with pytest.raises(Infeasible, match="exchanges"):
                replace(problem, costs=costs).cheapest(routes, "free")
            continue
        sizes = [held(one, problem.search("free")) for one in made]
        for limit in (INFINITE, *sizes):
            within = [one for one, size in zip(made, sizes, strict=True) if size <= limit]
            best = min(within, key=lambda one: one.seconds)
            assert replace(problem, costs=costs, limit=limit).cheapest(routes, "free") == best
        with pytest.raises(TooLarge) as caught:
            replace(problem, costs=costs, limit=min(sizes) - 1).cheapest(routes, "free")
        assert caught.value.least == min(sizes)
    assert len(problem.known) == 1
