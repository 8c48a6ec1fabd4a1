"""The contract of tests/engines/contract.py for torch.distributed.pipelining."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import _Action

from engines.torch_pipelining import engine as plug_in
from engines.torch_pipelining.engine import SCHEDULES, Config, TorchPipeliningEngine, build
from harness.config import registry
from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel, named
from harness.core.plan import Mesh, Plan
from harness.core.problem import Problem
from harness.interfaces import BatchShape, Model, OptimizerSpec, PlanRequest, Session, StepMetrics
from harness.measure import count_model
from harness.runtime.boundary_shapes import BoundaryShapes
from harness.schedule import action_file
from harness.simulator import simulate
from planners.block_partition import even
from tests import tiers
from tests.engines import contract, networks, zoo
from tests.engines.contract import Case, gentle
from tests.engines.networks import Network
from tests.problems import Row, row, rows
from tests.support.sessions import run_session

pytestmark = pytest.mark.usefixtures("ranks")

ZOO: dict[str, Model] = {name: zoo.model(name) for name in ("unet", "amoebanet", "gpt", "llama")}
MODELS: dict[str, Model] = {**networks.ALL, **ZOO}
TASKS = ("compute",)


def case(model: str, schedule: str, devices: int = 2, micro_batches: int = 4, data: int = 1, chunks: int = 2) -> Case:
    engine = build(Config(schedule=schedule, chunks=chunks))
    return Case(engine, MODELS[model], plan_of(engine, MODELS[model], devices, micro_batches, data))


def plan_of(
    engine: TorchPipeliningEngine, model: Model, devices: int = 2, micro_batches: int = 4, data: int = 1
) -> Plan:
    placement = engine.placement(devices) or tuple(range(devices))
    plan = Plan.contiguous(even(len(model.layers()), len(placement)), micro_batches)
    stages = tuple(replace(stage, device=placement[j]) for j, stage in enumerate(plan.stages))
    return replace(plan, mesh=Mesh(data=data, pipeline=devices), stages=stages)


@pytest.mark.fast
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", networks.ALL)
def test_trains_like_single(model: str, schedule: str) -> None:
    contract.check_training(case(model, schedule))


@pytest.mark.fast
@pytest.mark.parametrize(
    ("model", "schedule"),
    tiers.short_soak(
        [("unet", "gpipe"), ("unet", "zbv"), ("gpt", "gpipe"), ("gpt", "interleaved1f1b"), ("llama", "1f1b"),
         ("llama", "zbv"), *(heavy := [("amoebanet", "1f1b"), ("amoebanet", "zbv")])],
        heavy,
    ),
)  # fmt: skip
def test_trains_the_zoo_like_single(model: str, schedule: str) -> None:
    contract.check_training(replace(gentle(case(model, schedule, micro_batches=2)), samples=4))


@pytest.mark.parametrize(("schedule", "devices"), [("gpipe", 3), ("1f1b", 4), ("interleaved1f1b", 1), ("zbv", 1)])
@pytest.mark.parametrize("model", ["skips", "tied"])
def test_other_numbers_of_devices(model: str, schedule: str, devices: int) -> None:
    contract.check_training(case(model, schedule, devices))


def test_a_stage_without_parameters() -> None:
    bare = replace(Plan.contiguous([6, 2, 2], 4), mesh=Mesh(pipeline=3))  # a ReLU and a Flatten
    contract.check_training(replace(case("norms", "gpipe"), plan=bare))


def test_three_chunks() -> None:
    contract.check_training(case("skips", "interleaved1f1b", chunks=3))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_zbv_takes_fewer_micro_batches_than_it_needs_to_be_full(micro_batches: int) -> None:
    contract.check_training(case("skips", "zbv", micro_batches=micro_batches))


def test_in_float32() -> None:
    contract.check_training(replace(case("norms", "1f1b"), dtype="float32", optimizer=OptimizerSpec("sgd", lr=0.1)))


@pytest.mark.parametrize(("model", "schedule"), [("gpt", "1f1b"), ("gpt", "zbv"), ("skips", "gpipe")])
def test_replicas_of_a_pipeline(model: str, schedule: str) -> None:
    contract.check_training(gentle(case(model, schedule, micro_batches=2, data=2)))


def test_statistics_of_replicas() -> None:
    contract.check_statistics(case("norms", "gpipe", micro_batches=2, data=2))


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved1f1b"])
def test_states_move_between_engines(schedule: str) -> None:
    contract.check_state_moves(case("gpt", schedule))


def test_a_crash_reaches_the_caller() -> None:
    contract.check_crash(case("skips", "gpipe"), 9)


class Fails(nn.Module):
    """In its third pass, forward or backward; the passes of a copy that finds shapes do not count."""

    def __init__(self, forward: bool) -> None:
        super().__init__()
        self.passes, self.in_forward = 0, forward

    def forward(self, x: Tensor) -> Tensor:
        if self.in_forward:
            self.count()
        elif x.requires_grad:
            x.register_hook(lambda gradient: self.count())
        return x

    def count(self) -> None:
        self.passes += 1
        if self.passes == 3:
            raise ZeroDivisionError("on purpose")


@pytest.mark.parametrize(
    ("schedule", "forward"),
    [("gpipe", True), ("zbv", True), ("1f1b", False), ("interleaved1f1b", False), ("zbv", False)],
)
def test_an_error_while_it_runs_says_what_and_where(schedule: str, forward: bool) -> None:
    def layers() -> list[nn.Module]:
        return [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh(), Fails(forward), nn.Linear(4, 1)]

    pairs = networks.pairs()
    network = Network("fails", layers, pairs._inputs, lambda n: torch.randn(n, 1), pairs._loss)
    engine = build(Config(schedule=schedule))
    one = Case(engine, network, plan_of(engine, network))
    with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
        run_session(one.engine, one.model, one.plan, one.spec, lambda session: _step(session, one).loss)
    stage = one.plan.stage_of(4)
    where = f"in rank {one.plan.stages[stage].device}, stage {stage}, in the"
    if forward:
        notes = [f"in stage {stage}, layer '4', micro-batch 2", f"{where} forward pass of micro-batch 2"]
    else:
        notes = [f"{where} backward pass of micro-batch 2"]
    assert caught.value.__notes__ == notes


def fewest(schedule: str) -> int:
    """The micro-batches that a schedule of two devices needs at least: DualPipeV has as many as stages."""
    return 4 if schedule == "dualpipev" else 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_runs_its_schedule(schedule: str) -> None:
    contract.check_trace(case("skips", schedule), TASKS)


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_runs_its_schedule_with_sums(schedule: str) -> None:
    contract.check_trace(case("tied", schedule, micro_batches=fewest(schedule), data=2), TASKS)


@pytest.mark.parametrize(
    ("model", "data", "schedule"),
    tiers.short_soak(
        [("skips", 1, "gpipe"), ("skips", 1, "zbv"), *(("gpt", 2, schedule) for schedule in SCHEDULES)],
        [("gpt", 2, schedule) for schedule in SCHEDULES if schedule not in ("1f1b", "interleaved_zb")],
    ),
)
def test_sends_what_is_predicted(model: str, data: int, schedule: str) -> None:
    m = fewest(schedule)
    one = case(model, schedule, micro_batches=m, data=data)
    sent = run_session(one.engine, one.model, one.plan, one.spec, lambda session: _step(session, one).bytes_sent)
    profile = count_model.count(one.model, one.samples // (m * data), one.dtype)
    planned = one.engine.schedule(one.plan, profile)
    seconds = dict.fromkeys(map(str, planned.ops()), 1.0)
    found = simulate(planned, one.plan, profile, Cluster(devices_per_node=4), named("sgd_fp32"), durations=seconds)
    assert sent == found.figures["bytes_sent"]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved1f1b", "zbv"])
def test_predicted_and_counted_memory(schedule: str) -> None:
    """Within 15 %, on both devices: every micro-batch has buffers of its own, for good."""
    keys = {"name": "gpt", "layers": 3, "hidden": 32, "heads": 4, "sequence": 32, "vocabulary": 64}
    model = registry.build("model", OmegaConf.create(keys))
    engine = build(Config(schedule=schedule))
    one = Case(engine, model, plan_of(engine, model))

    def train(session: Session) -> list[int] | None:
        session.step(one.model.sample(one.samples))
        return _step(session, one).peak_memory_bytes

    counted = run_session(one.engine, one.model, one.plan, one.spec, train)
    profile = count_model.count(one.model, one.samples // 4, one.dtype)
    planned = one.engine.schedule(one.plan, profile)
    memory = one.engine.memory(named("sgd_fp32"), one.plan.mesh, profile)
    seconds = dict.fromkeys(map(str, planned.ops()), 1.0)
    found = simulate(planned, one.plan, profile, Cluster(devices_per_node=4), memory, durations=seconds)
    ratios = [p.bytes / m for p, m in zip(found.peaks, counted or [], strict=True)]
    assert all(0.85 < ratio < 1.15 for ratio in ratios), (ratios, [peak.contents for peak in found.peaks])


def _step(session: Session, one: Case) -> StepMetrics:
    return session.step(one.model.sample(one.samples), meter=True)


def test_batches_of_another_size_and_memory() -> None:
    """Buffers are made again where the micro-batches change; they count as memory."""
    one = case("pairs", "gpipe")

    def work(session: Session) -> list[list[int] | None]:
        peaks = [session.step(one.model.sample(n), meter=True).peak_memory_bytes for n in (8, 8, 64)]
        return [*peaks, session.step(one.model.sample(8)).peak_memory_bytes]

    first, again, large, unmetered = run_session(one.engine, one.model, one.plan, one.spec, work)
    assert first is not None and again is not None and large is not None and unmetered is None
    assert len(first) == 2
    assert first == again
    assert all(more > few + 56 * 4 * 8 for few, more in zip(first, large, strict=True))


def test_shapes_touch_nothing() -> None:
    """What passes between stages is found without changing weights, statistics or random numbers."""
    one = case("norms", "zbv")
    layers = one.model.layers()
    before = {name: value.clone() for name, value in layers.state_dict().items()}
    torch.manual_seed(5)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    shapes = BoundaryShapes(layers, one.plan, torch.device("cpu"), None)
    passing = shapes.boundaries((torch.empty(3, 2, 4, 4, dtype=one.model.sample(0).inputs.dtype),))
    assert torch.equal(torch.rand(3), drawn)
    assert all(torch.equal(value, before[name]) for name, value in layers.state_dict().items())
    assert [tuple(value.shape) for boundary in passing for value in boundary] == [
        (3, 2, 4, 4), (3, 4, 4, 4), (3, 4, 4, 4), (3, 64), (3, 5),
    ]  # fmt: skip
    assert [value.requires_grad for boundary in passing for value in boundary] == [False, True, True, True, True]


def test_placement() -> None:
    assert [build(Config(schedule=name)).placement(2) for name in ("gpipe", "1f1b")] == [(0, 1), (0, 1)]
    assert build(Config(schedule="interleaved1f1b", chunks=3)).placement(2) == (0, 1, 0, 1, 0, 1)
    assert build(Config(schedule="zbv")).placement(3) == (0, 1, 2, 2, 1, 0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_accepts_what_it_is_tested_with(schedule: str) -> None:
    contract.check_accepts(case("skips", schedule))


@pytest.mark.parametrize(
    ("schedule", "devices", "micro_batches", "right"),
    [
        ("1f1b", 3, 2, ["batch.micro_batches=4", "engine.schedule=gpipe"]),
        ("interleaved1f1b", 2, 5, ["batch.micro_batches=4", "engine.schedule=gpipe batch.micro_batches=4"]),
        ("interleaved1f1b", 4, 1, ["batch.micro_batches=4", "engine.schedule=gpipe"]),
        ("interleaved1f1b", 3, 4, ["engine.schedule=gpipe"]),
    ],
)
def test_refuses_micro_batches(schedule: str, devices: int, micro_batches: int, right: list[str]) -> None:
    """Of 8 samples: what is offered divides them."""
    problems = refused(case("skips", schedule, devices, micro_batches))
    assert rows(problems) == [("batch.micro_batches", micro_batches, right)]
    assert str(devices) in problems[0].message


def test_refuses_stages_in_other_places_and_recomputation() -> None:
    one = case("skips", "zbv")
    folded = replace(one, engine=build(Config(schedule="1f1b")), plan=replace(one.plan, recompute="always"))
    moved, again = refused(folded)
    assert row(moved) == ("planner", None, ["planner=balance", "planner=contiguous"])
    assert "devices 0, 1, 1, 0" in moved.message
    assert row(again) == ("planner", None, ["engine=gpipe"])


def refused(one: Case) -> list[Problem]:
    request = PlanRequest(BatchShape(one.samples, one.plan.micro_batches), one.plan.mesh.pipeline)
    early = one.engine.refuses(request, "float32", Cluster(devices_per_node=4))
    return early + one.engine.check(
        one.plan, contract.profile_of(one.model), Cluster(devices_per_node=4), named("sgd_fp32")
    )


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (Config(schedule="zb"), ("engine.schedule", "zb", ["engine.schedule=zbv"])),
        (Config(schedule="1F1B"), ("engine.schedule", "1F1B", ["engine.schedule=1f1b"])),
        (Config(schedule="interleaved1f1b", chunks=1),
         ("engine.chunks", 1, ["engine.chunks=2", "engine.schedule=1f1b without engine.chunks"])),
        (Config(schedule="zbv", chunks=3),
         ("engine.chunks", 3, ["without engine.chunks", "engine.schedule=interleaved1f1b"])),
        (Config(schedule="zbv", chunks=1), ("engine.chunks", 1, ["without engine.chunks"])),
    ],
)  # fmt: skip
def test_refuses_keys(config: Config, found: Row) -> None:
    assert rows(plug_in.check(config)) == [found]


@pytest.mark.parametrize("config", [*(Config(schedule=name) for name in SCHEDULES), Config(chunks=1)])
def test_accepts_keys(config: Config) -> None:
    assert plug_in.check(config) == []


def test_complex_numbers_between_stages() -> None:
    engine = build(Config())
    contract.check_training(Case(engine, networks.complexes(), plan_of(engine, networks.complexes())))


MIXED = """0F0,0F1,0F2,0I0,0W0,0F3,0B1,0I2,0B3,0W2
,1F0,1B0,1F1,1B1,1F2,1I2,1F3,1W2,1B3
"""
"""Whole backward passes and halves."""
LOOPED = """0F0,0F1,2F0,2F1,2B1,2B0,0B0,0B1
1F0,1F1,3F0,3F1,3B1,3B0,1B1,1B0
"""
"""The backward passes in another order than the forward ones."""
ON_ONE = "0F0,1F0,0F1,1F1,1B0,0B0,1B1,0B1\n2F0,2F1,2B0,2B1\n"


@pytest.mark.fast
@pytest.mark.parametrize(
    ("content", "micro_batches"), [(MIXED, 4), (LOOPED, 2), (ON_ONE, 2)], ids=["mixed", "looped", "one"]
)
@pytest.mark.parametrize("model", ["gpt", "skips"])
def test_the_order_of_a_file(model: str, content: str, micro_batches: int, tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    file.write_text(content, encoding="utf-8")
    found = case(model, str(file), micro_batches=micro_batches)
    plan = found.engine.ordered(found.plan, contract.profile_of(found.model), Cluster(), MemoryModel(), lambda one: ())
    file.unlink()
    contract.check_training(gentle(replace(found, plan=plan)))
    contract.check_trace(replace(found, plan=plan), TASKS)


def test_a_file_that_recomputes_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    file.write_text("0F0,0R0,0B0\n", encoding="utf-8")
    engine = build(Config(schedule=str(file)))
    (problem,) = engine.refuses(PlanRequest(BatchShape(4, 1), 1), "float32", Cluster())
    assert problem.message == "row 1, column 2: 0R0 recomputes, which this engine cannot"
    assert problem.fixes == ({"engine": "pipeline", "engine.schedule": str(file)},)


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1\n", ""),
        ("(0F0;0B0)OVERLAP_F_B,0F1,0B1\n1F0,1B0,1F1,1B1\n", "row 1, column 1"),
        ("0F0,,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1F1,1B0,1B1\n", "row 1, column 3"),
        ("0F0,0F1,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n", ""),
        ("0F0,0F1,0F2,0I0,0W0,0B1,0B2\n(1F0;1B0)OVERLAP_F_B,(1F1;1B1)OVERLAP_F_B,(1F2;1B2)OVERLAP_F_B\n", ""),
        ("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n(1F0;1B0)OVERLAP_F_B,(1F1;1B1)OVERLAP_F_B\n", ""),
        ("0F0,3F0,(0F1;3B0)OVERLAP_F_B,3F1,3B1,0B0,0B1\n1F0,2F0,(1F1;2B0)OVERLAP_F_B,2F1,2B1,1B0,1B1\n", ""),
        ("0F0,0F1,3F0,3F1,3B0,3B1,0B0,0B1\n1F0,2F0,1F1,(2F1;2B0)OVERLAP_F_B,2B1,1B0,1B1\n", "row 2, column 4"),
        ("0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,(1F1;1B0)OVERLAP_F_B,1F2,1B1,1B2\n2F0,2F1,2B0,2F2,2B1,2B2\n",
         "row 2, column 2"),
    ],
)  # fmt: skip
def test_pairs_that_torch_cannot_begin_are_refused(content: str, place: str, tmp_path: Path) -> None:
    """Exactly those for which it finds no order of messages."""
    file = tmp_path / "own.csv"
    file.write_text(content, encoding="utf-8")
    actions = action_file.read(file)
    order = {rank: [_Action.from_str(str(cell)) for cell in row if cell] for rank, row in enumerate(actions.rows)}
    with pytest.raises(AssertionError, match="can't schedule") if place else nullcontext():
        schedules._add_send_recv(order, lambda stage: actions.placement[stage], len(actions.placement))
    request = PlanRequest(BatchShape(12, actions.micro_batches), len(actions.rows))
    found = build(Config(schedule=str(file))).refuses(request, "float32", Cluster())
    assert [problem.fixes for problem in found] == [({"engine": "pipeline", "engine.schedule": str(file)},)] * bool(
        place
    )
    assert all(problem.message.startswith(f"{place}: ") for problem in found)


def test_a_file_whose_losses_come_in_another_order_is_refused(tmp_path: Path) -> None:
    """torch counts the last stage's forward passes to find a loss: it would train with those of other micro-batches."""
    file = tmp_path / "own.csv"
    file.write_text("0F1,0F0,0B1,0B0\n1F1,1F0,1B1,1B0\n", encoding="utf-8")
    engine = build(Config(schedule=str(file)))
    (problem,) = engine.refuses(PlanRequest(BatchShape(4, 2), 2), "float32", Cluster())
    assert problem.message == "row 2, column 1: 1F1 comes before 1F0, this engine needs the last stage's in order"
    assert problem.fixes == ({"engine": "pipeline", "engine.schedule": str(file)},)
