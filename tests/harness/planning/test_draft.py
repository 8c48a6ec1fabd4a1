"""A plan with its simulated step; and an engine whose schedule is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.cli.compose import compose
from harness.config import registry
from harness.core.cluster import Cluster, Device, Link
from harness.core.model_profile import LayerProfile, ModelProfile, SharedBuffer
from harness.core.plan import Plan
from harness.core.problem import CannotRun, Problem
from harness.core.traits import Traits
from harness.planning import draft as planning_draft
from harness.schedule import QueueOps, Schedule
from harness.schedule.builders.gpipe import gpipe
from tests.problems import refused, rows

LAYER = LayerProfile("l", 1e-3, 2e-3, param_bytes=4000, output_bytes=8, saved_bytes=8)
PROFILE = ModelProfile((LAYER,) * 4, "net_4", 2, source="a test")
CLUSTER = Cluster(devices_per_node=2, device=Device(memory_bytes=10**9), intra=Link(0.0, 0.0))
CONFIG = compose(["batch.size=8", "batch.micro_batches=4", "engine.checkpoint=never", "planner=uniform"])


class Broken:
    """The gpipe engine, with a change of its schedule."""

    def __init__(self, change: Any) -> None:
        self.change = change
        self.engine = registry.build("engine", CONFIG.engine)
        self.capabilities, self.check = self.engine.capabilities, self.engine.check
        self.placement, self.memory, self.refuses = self.engine.placement, self.engine.memory, self.engine.refuses
        self.refuses_layers = self.engine.refuses_layers
        self.layers, self.ordered, self.copies = self.engine.layers, self.engine.ordered, self.engine.copies

    def schedule(self, plan: Plan, profile: ModelProfile) -> Schedule:
        return self.change(gpipe(plan.micro_batches, [0, 1], [], "never"))


def drafted(engine: Any = None, profile: ModelProfile = PROFILE) -> planning_draft.Draft:
    engine = engine or registry.build("engine", CONFIG.engine)
    return planning_draft.draft(CONFIG, engine, registry.build("planner", CONFIG.planner), profile, CLUSTER)


def test_a_draft_holds_the_closed_form() -> None:
    """(m + n - 1) (F + B) of GPipe without communication."""
    draft = drafted()
    assert draft.plan.balance == (2, 2)
    assert draft.plan.predicted["step_time_s"] == pytest.approx((4 + 2 - 1) * (2e-3 + 4e-3))
    assert (draft.samples, draft.devices) == (8, 2)
    assert draft.plan.predicted["peak_memory_bytes"] == [peak.bytes for peak in draft.simulation.peaks]


@pytest.mark.parametrize(
    ("share", "cores", "factor"),
    [
        (0.0, 2.0, 1.0),
        (0.25, 2.0, 1.25),  # two threads do the work of 2 / 1.25
        (1.5, 2.0, 2.5),  # less than one alone, which still has a core
        (1.5, 0.0, 1.0),  # devices that share no interpreter
    ],
)
def test_threads_of_one_python_wait_for_its_lock(share: float, cores: float, factor: float) -> None:
    """Where both stages compute; the first and the last task of a step are alone."""
    cluster = replace(CLUSTER, cores=cores, process_cores=cores)
    engine = registry.build("engine", CONFIG.engine)
    profile = replace(PROFILE, lock_share=share)
    found = planning_draft.draft(CONFIG, engine, registry.build("planner", CONFIG.planner), profile, cluster)
    alone_s, both_s = 2 * (2e-3 + 4e-3), 3 * (2e-3 + 4e-3)
    assert found.plan.predicted["step_time_s"] == pytest.approx(alone_s + factor * both_s)


def test_the_engine_says_what_becomes_of_the_layers() -> None:
    """Twice the time, and 1000 bytes more while they go back."""
    engine = registry.build("engine", CONFIG.engine)
    engine.layers = lambda plan, profile: replace(profile, layers=tuple(
        replace(layer, forward_s=2 * layer.forward_s, backward_s=2 * layer.backward_s, working_bytes=1000)
        for layer in profile.layers
    ))  # fmt: skip
    plain, changed = drafted(), drafted(engine)
    assert changed.plan.predicted["step_time_s"] == pytest.approx(2 * plain.plan.predicted["step_time_s"])
    assert changed.simulation.peaks[0].bytes == plain.simulation.peaks[0].bytes + 1000
    assert plain.profile is PROFILE


def test_without_jitter_nothing_is_simulated_again() -> None:
    draft = drafted()
    assert draft.disturbed(0.0, 1) is draft.simulation
    assert draft.disturbed(0.1, 1).figures["step_time_s"] != draft.simulation.figures["step_time_s"]


def test_replicas_count_as_devices_and_samples() -> None:
    draft = drafted()
    plan = replace(draft.plan, mesh=replace(draft.plan.mesh, data=3))
    assert (replace(draft, plan=plan).samples, replace(draft, plan=plan).devices) == (24, 6)


def test_a_changed_shared_buffer_on_two_devices_is_refused_with_a_balance_that_plans() -> None:
    shared = replace(LAYER, buffer_bytes=8, shared_buffers=(SharedBuffer("1.count", 8, written=True),))
    profile = replace(PROFILE, layers=(LAYER, shared, shared, LAYER))
    with pytest.raises(CannotRun) as caught:
        drafted(profile=profile)
    (row,) = refused(caught)
    assert row.key == "model" and "'1.count'" in row.message
    config = compose(["planner=given", f"planner.balance={row.fixes[0]['planner.balance']}", "batch.size=8"])
    engine, planner = registry.build("engine", config.engine), registry.build("planner", config.planner)
    assert planning_draft.draft(config, engine, planner, profile, CLUSTER).plan.balance == (1, 3)


def queues(change: Any) -> Any:
    """A change of each queue's ops."""
    return lambda schedule: replace(
        schedule, queues=tuple(QueueOps(queue.device, queue.name, change(queue.ops)) for queue in schedule.queues)
    )


def problems(change: Any) -> list[Problem]:
    with pytest.raises(CannotRun) as caught:
        drafted(Broken(change))
    assert {(problem.key, problem.value) for problem in caught.value.problems} == {("engine", "gpipe")}
    assert not any("\n" in problem.message for problem in caught.value.problems)
    return list(caught.value.problems)


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        (queues(lambda ops: ops[::-1]), "waits for itself"),
        (lambda schedule: replace(schedule, limit=1), "0F1 -> 0B1 -> 0B0 -> 0F1"),
        (queues(lambda ops: (*ops, ops[0])), "0F0"),
        (lambda schedule: replace(schedule, queues=schedule.queues[:1]), "1F0"),
        (queues(lambda ops: tuple(op for op in ops if str(op) != "1B2")), "1B2"),
    ],
    ids=["a circle", "a circle by its limit", "an op twice", "a queue that is missing", "an op that is missing"],
)
def test_a_schedule_that_is_none_is_a_problem_of_its_engine(change: Any, reported: str) -> None:
    found = problems(change)
    assert any(reported in problem.message for problem in found)
    assert len(found) <= planning_draft.SHOWN + 1 and all(problem.hint for problem in found[: planning_draft.SHOWN])


def test_what_the_planner_refuses() -> None:
    with pytest.raises(CannotRun) as caught:
        planning_draft.draft(
            compose(["planner=given", "planner.balance=[1,2]", "batch.micro_batches=4"]),
            registry.build("engine", CONFIG.engine),
            registry.build("planner", compose(["planner=given", "planner.balance=[1,2]"]).planner),
            PROFILE,
            CLUSTER,
        )
    assert rows(refused(caught)) == [("planner.balance", [1, 2], ["planner=balance"])]


@pytest.mark.parametrize(
    ("both", "balance"),
    [
        ({}, (3, 3)),
        ({"traits": Traits(uses=("l2.weight",))}, (4, 2)),
        ({"buffer_bytes": 8, "shared_buffers": (SharedBuffer("b", 8, written=True),)}, (4, 2)),
    ],
    ids=["anywhere", "one weight", "one buffer"],
)
def test_an_engine_that_moves_layers_keeps_those_together_that_must_be(both: Any, balance: tuple[int, ...]) -> None:
    """Layers 2 and 3 of six; the planner is asked for one layer in the first stage."""
    typed = ["engine=pipeline", "engine.schedule=search", "engine.placement=one", "engine.boundaries=search",
             "planner=given", "planner.balance=[1,5]", "batch.size=8", "batch.micro_batches=4"]  # fmt: skip
    config = compose(typed)
    layers = [replace(LAYER, name=f"l{number}") for number in range(6)]
    layers[2] = replace(layers[2], **{key: value for key, value in both.items() if key != "traits"})
    layers[3] = replace(layers[3], **both)
    engine, planner = registry.build("engine", config.engine), registry.build("planner", config.planner)
    draft = planning_draft.draft(config, engine, planner, replace(PROFILE, layers=tuple(layers)), CLUSTER)
    assert draft.plan.balance == balance
    assert draft.plan.predicted["step_time_s"] < draft.plan.predicted["planner_step_s"]


def drafted_by(*typed: str, profile: ModelProfile, cluster: Cluster = CLUSTER) -> planning_draft.Draft:
    config = compose(["engine=pipeline", "mesh.pipeline=2", "batch.size=8", "batch.micro_batches=2", *typed])
    engine, planner = registry.build("engine", config.engine), registry.build("planner", config.planner)
    return planning_draft.draft(config, engine, planner, profile, cluster)


@pytest.mark.parametrize("traits", [Traits(draws=True), Traits(changes=("l2.weight",)), Traits(too_large="'x' of L")])
def test_a_file_recomputes_no_layer_that_cannot_be(traits: Traits, tmp_path: Path) -> None:
    """A recomputation would draw other numbers, or change a weight twice: the request knows of none."""
    layers = [replace(LAYER, name=f"l{number}") for number in range(4)]
    layers[2] = replace(layers[2], traits=traits)
    profile, file = replace(PROFILE, layers=tuple(layers)), tmp_path / "own.csv"
    file.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert drafted_by(f"engine.schedule={file}", profile=profile).plan.recompute == "never"
    file.write_text("0F0,0F1,0B0,0B1\n1F0,1R0,1B0,1F1,1B1\n")
    with pytest.raises(CannotRun) as caught:
        drafted_by(f"engine.schedule={file}", profile=profile)
    (row,) = refused(caught)
    assert row.key == "model" and row.fixes == ({"engine.schedule": "1f1b"},)
    drafted_by("engine.schedule=1f1b", profile=profile)


def test_a_search_that_finds_nothing_is_a_problem() -> None:
    """Each task needs more than the device has."""
    tight = replace(CLUSTER, device=Device(memory_bytes=10_000))
    with pytest.raises(CannotRun) as caught:
        drafted_by("engine.schedule=search", "engine.placement=one", profile=PROFILE, cluster=tight)
    assert [problem.key for problem in refused(caught)] == ["device 1"]
