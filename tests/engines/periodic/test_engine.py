"""What the engine refuses, and which weights it lets a micro-batch see."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engines.periodic import weight_versions
from engines.periodic.engine import Config, build, check
from harness.core.cluster import Cluster, Device
from harness.core.memory_model import MemoryModel, named
from harness.core.model_profile import LayerProfile, ModelProfile, Skip, Tied
from harness.core.op import Op
from harness.core.pattern import Placed
from harness.core.plan import Mesh, Plan
from harness.core.problem import CannotRun, Problem
from harness.core.staleness import Corrections
from harness.interfaces import BatchShape, PlanRequest, SessionSpec
from harness.schedule.validate import validation_errors
from harness.simulator import simulate
from tests.engines import networks
from tests.engines.periodic.patterns import plan
from tests.problems import refused, row, rows

PROFILE = ModelProfile(tuple(LayerProfile(f"{n}", output_bytes=10 + n, param_bytes=100) for n in range(6)))
FIVE = plan([1, 1, 1, 1, 2], 12)
"""Its first stage stores five micro-batches."""


def problems(chosen: Plan, every: int | None = None, profile: ModelProfile = PROFILE) -> list[Problem]:
    return build(Config(update_every=every)).check(chosen, profile, Cluster(devices_per_node=8), named("sgd_fp32"))


def test_the_fewest_micro_batches_that_two_versions_allow() -> None:
    engine = build(Config())
    order = weight_versions.schedule(FIVE, FIVE.pattern, 12, 12)
    assert weight_versions.stored(order) == [5, 4, 3, 2, 1]
    assert weight_versions.allowed(order, 12) == [4, 6, 12]
    assert engine.update_every(FIVE) == 4
    assert [op.micro_batch for op in engine.schedule(FIVE, PROFILE).ops() if str(op).startswith("0step")] == [3, 7, 11]
    assert build(Config()).update_every(plan([6], 12)) == 1


def test_two_groups_of_a_step_need_no_more_than_two_versions() -> None:
    """Whatever is under way: both begin with the step's first weights."""
    assert weight_versions.allowed(weight_versions.schedule(FIVE, FIVE.pattern, 4, 4), 4) == [2, 4]


def test_a_stage_that_stores_one_more_than_a_group_is_allowed() -> None:
    for slack in range(4):
        chosen = plan([1, 1, 1, 1, 2], 24, slack=slack)
        order = weight_versions.schedule(chosen, chosen.pattern, 24, 24)
        fits = [every for every in (1, 2, 3, 4, 6, 8) if every + 1 >= max(weight_versions.stored(order))]
        assert set(fits) <= set(weight_versions.allowed(order, 24)), slack
        assert min(weight_versions.allowed(order, 24)) + 1 >= min(13, max(weight_versions.stored(order))), slack


def test_updates_too_often_are_refused_with_both_numbers_and_a_fix() -> None:
    assert rows(problems(FIVE, 3)) == [("engine.update_every", 3, ["engine.update_every=4"])]
    assert {"4", "5"} <= set(problems(FIVE, 3)[0].message.split())
    with pytest.raises(CannotRun) as caught:
        build(Config(update_every=3)).session(networks.tokens(), FIVE, SessionSpec(("cpu",) * 5))
    assert refused(caught) == problems(FIVE, 3)
    assert [problems(FIVE, every) for every in (4, 6, 12, None)] == [[]] * 4


@pytest.mark.parametrize(("every", "right"), [(5, 6), (8, 6), (24, 12)])
def test_updates_that_do_not_share_the_micro_batches(every: int, right: int) -> None:
    request = PlanRequest(BatchShape(24, 12), pipeline=2)
    [problem] = build(Config(update_every=every)).refuses(request, "float32", Cluster(devices_per_node=2))
    assert (problem.key, problem.value) == ("engine.update_every", every)
    assert problem.fixes[0] == {"engine.update_every": right} and "batch.micro_batches 12" in problem.message


@pytest.mark.parametrize("every", [None, 1, 4, 12])
def test_updates_that_share_the_micro_batches(every: int | None) -> None:
    request = PlanRequest(BatchShape(24, 12), pipeline=2)
    assert build(Config(update_every=every)).refuses(request, "float32", Cluster(devices_per_node=2)) == []


@pytest.mark.parametrize("every", [0, -2])
def test_a_number_of_micro_batches_is_at_least_one(every: int) -> None:
    assert rows(check(Config(update_every=every))) == [("engine.update_every", every, ["engine.update_every=null"])]
    assert check(Config(update_every=1)) == check(Config()) == []


def test_a_plan_without_a_pattern() -> None:
    engine, chosen = build(Config()), Plan.contiguous([3, 3], 4)
    assert rows(problems(chosen)) == [
        ("planner", None, ["planner=madpipe", "planner=contiguous", "planner=pipedream"]),
    ]
    with pytest.raises(CannotRun, match="gives no pattern"):
        engine.schedule(chosen, PROFILE)


def test_recomputation_and_replicas() -> None:
    assert rows(problems(replace(plan([3, 3], 4), recompute="always"))) == [("planner", None, ["engine=gpipe"])]
    assert not build(Config()).capabilities.data


def test_a_parameter_of_two_stages() -> None:
    tied = (Tied("0.weight", 100),)
    layers = tuple(replace(layer, tied=tied) if n in (0, 5) else layer for n, layer in enumerate(PROFILE.layers))
    [problem] = problems(plan([2, 2, 2], 4, [0, 1, 0]), profile=ModelProfile(layers))
    assert row(problem) == ("mesh.pipeline", 2, ["engine=gpipe", "mesh.pipeline=1"])
    assert "0.weight" in problem.message and "stages 0 and 2" in problem.message
    assert problems(plan([6], 4), profile=ModelProfile(layers)) == []


@pytest.mark.parametrize(("held", "stages", "cut"), [
    ((0, 5), 2, "stages 0 and 1"), ((0, 5), 6, "stages 0 and 5"), ((0, 5), 1, ""), ((0, 5), 7, ""),
    ((2, 3), 5, ""), ((2, 3), 6, "stages 2 and 3"), ((0, 4), 3, "stages 0 and 2"), ((0, 4), 2, ""),
])  # fmt: skip
def test_a_parameter_that_every_plan_cuts_is_refused_before_there_is_one(
    held: tuple[int, int], stages: int, cut: str
) -> None:
    """planner=madpipe would search for seconds."""
    tied = (Tied("0.weight", 100),)
    layers = tuple(replace(layer, tied=tied) if n in held else layer for n, layer in enumerate(PROFILE.layers))
    request = PlanRequest(BatchShape(8, 4), stages)
    found = build(Config()).refuses_layers(request, ModelProfile(layers))
    assert [row(problem) for problem in found] == [
        ("mesh.pipeline", stages, ["engine=gpipe", "mesh.pipeline=1"])
    ] * bool(cut)
    assert all(f"puts 0.weight into {cut}, engine=periodic takes it in 1" in problem.message for problem in found)


def test_patterns_that_are_not_those_of_the_plan() -> None:
    good = plan([3, 3], 4)
    assert good.pattern is not None
    ops = good.pattern.ops
    without = replace(good, pattern=replace(good.pattern, ops=ops[:-1]))
    twice = replace(good, pattern=replace(good.pattern, ops=(*ops, ops[0])))
    away = replace(good, pattern=replace(good.pattern, ops=(replace(ops[0], device=1), *ops[1:])))
    weights = replace(good, pattern=replace(good.pattern, ops=(*ops, Placed(Op(1, "W", 0), 1, 0, 9))))
    assert [problems(wrong)[0].numbers for wrong in (without, twice, away, weights)] == [
        {"device": 0, "found": 0, "needed": 1},
        {"device": 0, "found": 2, "needed": 1},
        {"device": 1, "found": 1, "needed": 0},
        {"device": 1, "found": 1, "needed": 0},
    ]


def test_a_pattern_that_can_never_run_does_not_wait_for_ever() -> None:
    """1F before 1B before 0F of a micro-batch: reported before anything waits."""
    model, good = networks.tokens(), plan([3, 3], 4)
    assert good.pattern is not None
    late = tuple(replace(p, shift=p.shift + 5) if str(p.op) == "0F0" else p for p in good.pattern.ops)
    bad = replace(good, pattern=replace(good.pattern, ops=late))
    with (
        pytest.raises(CannotRun, match="waits for itself"),
        build(Config()).session(model, bad, SessionSpec(("cpu", "cpu"))),
    ):
        pass


def test_one_message_crosses_a_cut_with_all_skips() -> None:
    profile = replace(PROFILE, skips=(Skip(0, 5, 7, "up"), Skip(1, 2, 3, "in")))
    schedule = build(Config()).schedule(plan([2, 2, 2], 4), profile)
    assert {str(op): op.bytes for op in schedule.ops() if op.kind == "copy" and op.micro_batch == 0} == {
        "1copy0<0": 11 + 7 + 3, "2copy0<1": 13 + 7, "0copy0<1": 11 + 7 + 3, "1copy0<2": 13 + 7,
    }  # fmt: skip
    chosen = plan([2, 2, 2], 4, [0, 0, 1])
    schedule = build(Config()).schedule(chosen, profile)
    assert {op.stage for op in schedule.ops() if op.kind == "copy"} == {1, 2}
    assert validation_errors(schedule, chosen) == []


def test_the_weights_are_there_twice() -> None:
    model = build(Config()).memory(named("adam_fp32"), Mesh(pipeline=2), PROFILE)
    assert model.state_parts(PROFILE, range(2)) == {"weights": 400, "gradients": 200, "optimizer": 400, "buffers": 0}


def test_it_says_how_often_weights_are_updated() -> None:
    (note,) = build(Config()).notes(FIVE, PROFILE, Cluster(devices_per_node=8), MemoryModel())
    assert row(note) == ("engine.update_every", 4, ["engine.update_every=12"])
    assert "3 updates a step, of 4 of its 12 micro-batches" in note.message
    assert build(Config(update_every=12)).notes(FIVE, PROFILE, Cluster(devices_per_node=8), MemoryModel()) == []


@pytest.mark.parametrize(("versions", "every", "late"), [("stash", 1, [4, 3, 2, 1, 0]), ("none", 3, [2, 1, 1, 1, 0])])
def test_it_says_how_late_each_stage_is(versions: str, every: int, late: list[int]) -> None:
    engine = build(Config(versions=versions, update_every=every))
    (note,) = engine.notes(FIVE, PROFILE, Cluster(devices_per_node=8), MemoryModel())
    assert f"{late} updates old".replace(", ", ",") in note.message
    assert build(Config(versions=versions)).update_every(FIVE) == 1


def test_flush_is_one_update_a_step() -> None:
    engine, cluster = build(Config(versions="flush")), Cluster(devices_per_node=8)
    assert engine.update_every(FIVE) == 12 and engine.notes(FIVE, PROFILE, cluster, MemoryModel()) == []
    request = PlanRequest(BatchShape(24, 12), pipeline=2)
    [problem] = build(Config(versions="flush", update_every=4)).refuses(request, "float32", cluster)
    assert row(problem) == ("engine.update_every", 4, ["engine.update_every=null"])
    assert build(Config(versions="flush", update_every=12)).refuses(request, "float32", cluster) == []


def test_versions_that_do_not_exist() -> None:
    assert rows(check(Config(versions="2wb"))) == [("engine.versions", "2wb", ["engine.versions=2bw"])]
    wrong = Config(corrections=Corrections(lr_steps=-2))
    assert rows(check(wrong)) == [("engine.corrections.lr_steps", -2, ["engine.corrections.lr_steps=0"])]


@pytest.mark.parametrize(
    ("config", "weights", "optimizer"),
    [
        (Config(versions="flush"), 1, 2),
        (Config(versions="none"), 1, 2),
        (Config(versions="stash"), 4, 2),
        (Config(corrections=Corrections(error_feedback=True)), 2, 3),
        (Config(corrections=Corrections(look_ahead=0.9)), 2, 3),
        (Config(versions="stash", corrections=Corrections(prediction=True)), 5, 3),
        (Config(versions="none", corrections=Corrections(discrepancy=0.135)), 2, 3),
        (Config(versions="none", corrections=Corrections(discrepancy=0.135, look_ahead=0.9)), 2, 4),
    ],
)
def test_copies_of_the_weights(config: Config, weights: int, optimizer: int) -> None:
    """In multiples of the weights: versions, those that are predicted from, and the last update."""
    model = build(config).memory(named("adam_fp32"), Mesh(pipeline=4), PROFILE)
    parts = model.state_parts(PROFILE, range(2))
    assert (parts["weights"], parts["optimizer"]) == (200 * weights, 200 * optimizer)


def test_no_more_copies_than_are_needed() -> None:
    """A copy for each version that some micro-batch still needs: P - j for stash, 2 for 2bw, 1 for none and flush."""
    order = weight_versions.schedule(FIVE, FIVE.pattern, 12, 1)  # type: ignore[arg-type]
    tasks = weight_versions.tasks_of(order)
    assert [weight_versions.copy_plan(own, "stash", 1, Corrections(), 0).count for own in tasks] == [5, 4, 3, 2, 1]
    assert [weight_versions.copy_plan(own, "none", 1, Corrections(), 0).count for own in tasks] == [1] * 5
    order = weight_versions.schedule(FIVE, FIVE.pattern, 12, 4)  # type: ignore[arg-type]
    tasks = weight_versions.tasks_of(order)
    assert [weight_versions.copy_plan(own, "2bw", 4, Corrections(), 0).count for own in tasks] == [2] * 5


def test_predicted_memory_counts_what_an_update_holds() -> None:
    """One layer of 100 bytes for each stage, which saves 1 and sends nothing. Weights and optimizer state are always
    there; gradients only from the backward task on; Adam works with two copies of a parameter."""
    layers = tuple(LayerProfile(param_bytes=100, saved_bytes=1, forward_s=1.0, backward_s=2.0) for _ in range(3))
    timed, chosen = ModelProfile(layers), plan([1, 1, 1], 6)
    cluster = Cluster(devices_per_node=8, device=Device(memory_bandwidth=1e4))

    def peaks(versions: str, optimizer: str, every: int | None = None) -> list[int]:
        engine = build(Config(versions=versions, update_every=every))
        memory = replace(engine.memory(named(optimizer), Mesh(3), timed), copies=engine.copies(chosen))
        return simulate(engine.schedule(chosen, timed), chosen, timed, cluster, memory).figures["peak_memory_bytes"]

    assert peaks("none", "sgd_fp32") == [100 + 100 + kept for kept in (3, 2, 1)]  # in a backward task
    assert peaks("stash", "sgd_fp32") == [100 * (3 - j) + 100 + 3 - j for j in range(3)]
    assert peaks("none", "adam_fp32") == [100 + 100 + 200 + 200 + kept for kept in (2, 1, 0)]  # in an update
    accumulated = [100 + 100 + 100 + kept for kept in (3, 2, 1)]  # a new gradient is added to that of the group
    assert peaks("none", "sgd_fp32", 2) == accumulated == peaks("flush", "sgd_fp32")


def test_predicted_memory_counts_the_copies_of_each_stage() -> None:
    """Each layer has 100 bytes of weights, the last stage has two layers."""
    engine = build(Config(versions="stash"))
    assert engine.copies(FIVE) == (5, 4, 3, 2, 1)
    ahead = build(Config(versions="stash", corrections=Corrections(prediction=True)))
    assert ahead.copies(FIVE) == (6, 5, 4, 3, 2) and build(Config()).copies(FIVE) == (2,) * 5
    timed = ModelProfile(tuple(replace(layer, forward_s=1.0, backward_s=2.0) for layer in PROFILE.layers))
    schedule, cluster = engine.schedule(FIVE, timed), Cluster(devices_per_node=8)
    peaks = [
        simulate(schedule, FIVE, timed, cluster, replace(named("sgd_fp32"), copies=copies)).figures["peak_memory_bytes"]
        for copies in ((1,) * 5, engine.copies(FIVE))
    ]
    assert [more - less for less, more in zip(*peaks, strict=True)] == [400, 300, 200, 100, 0]
