"""The contract of tests/engines/contract.py for engine=pipeline: any schedule, and files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from engines.pipeline import engine as plug_in
from engines.pipeline.engine import Config, PipelineEngine, build
from engines.torch_pipelining import engine as torch_plug_in
from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.plan import Mesh, Plan
from harness.core.problem import Problem, ProblemError
from harness.interfaces import BatchShape, Model, OptimizerSpec, PlanRequest
from harness.runtime.stage_passes import DTYPES
from harness.schedule import action_file
from harness.schedule.builders.one_f_one_b import one_f_one_b
from harness.schedule.families import FAMILIES
from planners.block_partition import even
from tests.engines import contract, networks, zoo
from tests.engines.contract import Case, gentle
from tests.engines.test_resuming import DRAWS, flat
from tests.problems import Row, rows
from tests.tiers import short_soak

pytestmark = pytest.mark.usefixtures("ranks")

ZOO: dict[str, Model] = {name: zoo.model(name) for name in ("unet", "amoebanet", "gpt", "llama")}
MODELS: dict[str, Model] = {**networks.ALL, **ZOO}


def case(
    model: str,
    schedule: str,
    devices: int = 2,
    micro_batches: int = 4,
    data: int = 1,
    checkpoint: str = "never",
    transport: str = "torch",
) -> Case:
    engine = build(Config(schedule=schedule, checkpoint=checkpoint, transport=transport))
    plan = replace(plan_of(engine, MODELS[model], devices, micro_batches, data), recompute=checkpoint)
    return Case(engine, MODELS[model], plan)


def plan_of(engine: PipelineEngine, model: Model, devices: int, micro_batches: int, data: int) -> Plan:
    placement = engine.placement(devices)
    plan = Plan.contiguous(even(len(model.layers()), len(placement)), micro_batches)
    stages = tuple(replace(stage, device=placement[j]) for j, stage in enumerate(plan.stages))
    plan = replace(plan, mesh=Mesh(data=data, pipeline=devices), stages=stages)
    return engine.ordered(
        plan, contract.profile_of(model), Cluster(devices_per_node=devices), MemoryModel(), lambda one: ()
    )


def allowed(plan: Plan) -> list[Problem]:
    return []


@pytest.mark.fast
@pytest.mark.parametrize("schedule", FAMILIES)
@pytest.mark.parametrize("model", networks.ALL)
def test_trains_like_single(model: str, schedule: str) -> None:
    contract.check_training(case(model, schedule))


@pytest.mark.fast
@pytest.mark.parametrize("schedule", FAMILIES)
@pytest.mark.parametrize("model", short_soak(ZOO, zoo.HEAVY))
def test_trains_the_zoo_like_single(model: str, schedule: str) -> None:
    contract.check_training(replace(gentle(case(model, schedule, micro_batches=4)), samples=4))


@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved1f1b", "zbv"])
@pytest.mark.parametrize("model", [*networks.ALL, "gpt", "unet"])
def test_recomputes_like_single(model: str, schedule: str, checkpoint: str) -> None:
    contract.check_training(gentle(case(model, schedule, checkpoint=checkpoint)))


def test_a_recomputation_draws_the_same_random_numbers() -> None:
    """Plain dropout draws from torch's own generator, in the order of the forward passes; recomputation changes nothing
    in that."""
    case = replace(flat(build, Config(), 2, model=DRAWS), dtype="float64")
    again = replace(flat(build, Config(checkpoint="always"), 2, mode="always", model=DRAWS), dtype="float64")
    want, got = (contract.run(one, steps=3) for one in (case, again))
    assert got.losses == want.losses
    torch.testing.assert_close(got.states[-1]["model"], want.states[-1]["model"], rtol=0, atol=0)


@pytest.mark.parametrize(("schedule", "devices"), [("gpipe", 3), ("1f1b", 4), ("interleaved1f1b", 1), ("zbv", 1)])
@pytest.mark.parametrize("model", ["skips"])
def test_other_numbers_of_devices(model: str, schedule: str, devices: int) -> None:
    contract.check_training(case(model, schedule, devices))


@pytest.mark.parametrize(("model", "schedule"), [("gpt", "1f1b"), ("gpt", "zbv"), ("skips", "gpipe")])
def test_replicas_of_a_pipeline(model: str, schedule: str) -> None:
    contract.check_training(gentle(case(model, schedule, micro_batches=2, data=2)))


def test_statistics_of_replicas() -> None:
    contract.check_statistics(case("norms", "gpipe", micro_batches=2, data=2))


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_over_mpi(schedule: str) -> None:
    contract.check_training(gentle(case("gpt", schedule, transport="mpi")))


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved1f1b", "zbv"])
def test_states_move_between_engines(schedule: str) -> None:
    contract.check_state_moves(case("gpt", schedule))


@pytest.mark.parametrize("schedule", FAMILIES)
def test_its_trace_is_one_of_its_schedule(schedule: str) -> None:
    contract.check_trace(case("skips", schedule))


def test_its_trace_with_replicas_ties_and_recomputation() -> None:
    contract.check_trace(case("gpt", "1f1b", micro_batches=2, data=2, checkpoint="always"))


def test_a_crash_reaches_the_caller() -> None:
    contract.check_crash(case("skips", "zbv"), 9)


def test_in_float32() -> None:
    contract.check_training(replace(case("norms", "zbv"), dtype="float32", optimizer=OptimizerSpec("sgd", lr=0.1)))


FILES = {
    "mixed": ("0F0,0F1,0F2,0I0,0W0,0F3,0B1,0I2,0B3,0W2\n,1F0,1B0,1F1,1B1,1F2,1I2,1F3,1W2,1B3\n", 4),
    "reversed": ("0F0,0F1,2F0,2F1,2B1,2B0,0B0,0B1\n1F0,1F1,3F0,3F1,3B1,3B0,1B1,1B0\n", 2),
    "two on one": ("0F0,1F0,0F1,1F1,1B0,0B0,1B1,0B1\n2F0,2F1,2B0,2B1\n", 2),
    "recomputed": ("0F0,0F1,0R0,0I0,0B1,0W0\n1F0,1R0,1B0,1F1,1I1,1W1\n", 2),
    "up and down": ("0F0,0F1,3F0,3B0,3F1,3B1,0B0,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1\n", 2),
}


@pytest.mark.fast
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("model", ["gpt", "skips", "norms"])
def test_the_order_of_a_file(model: str, name: str, tmp_path: Path) -> None:
    content, micro_batches = FILES[name]
    file = tmp_path / "own.csv"
    file.write_text(content, encoding="utf-8")
    found = case(model, str(file), micro_batches=micro_batches)
    file.unlink()
    contract.check_training(gentle(found))
    contract.check_trace(found)


@pytest.mark.parametrize("model", ["unet", "gpt", "amoebanet"])
def test_a_searched_order_trains_like_single(model: str) -> None:
    found = case(model, "search")
    assert found.plan.order
    contract.check_training(replace(gentle(found), samples=4))


def refused(request: PlanRequest, schedule: str, **keys: object) -> list[Row]:
    return rows(build(Config(schedule=schedule, **keys)).refuses(request, "float32", Cluster(devices_per_node=8)))  # type: ignore[arg-type]


@pytest.mark.fast
def test_micro_batches_in_another_order(tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    file.write_text("0F2,0F0,0F1,0B1,0B2,0B0\n1F0,1F2,1B2,1F1,1B1,1B0\n", encoding="utf-8")
    contract.check_training(gentle(case("gpt", str(file), micro_batches=3)))


def test_a_file_with_more_stages_than_layers_is_refused(tmp_path: Path) -> None:
    file = str(tmp_path / "own.csv")
    Path(file).write_text("0F0,0B0\n1F0,2F0,2B0,1B0\n", encoding="utf-8")
    (problem,) = build(Config(schedule=file)).refuses(PlanRequest(BatchShape(4, 1), 2, layers=2), "float32", Cluster())
    assert (problem.key, problem.message) == ("engine.schedule", "has 3 stages, the model has 2 layers")
    assert not problem.fixes


def test_an_order_is_as_welcome_in_a_file_as_by_name(tmp_path: Path) -> None:
    """The simulator lets messages that block wait for any task to end: 1F1B ends there, as a file, too."""
    file = str(tmp_path / "own.csv")
    action_file.write(action_file.from_schedule(one_f_one_b(4, range(3), [])), file)
    for schedule in (file, "1f1b"):
        engine = build(Config(schedule=schedule))
        assert engine.refuses(PlanRequest(BatchShape(8, 4), 3), "float32", Cluster(blocking_messages=True)) == []


def test_an_order_that_never_ends_where_messages_block_is_noted(tmp_path: Path) -> None:
    """Rank 0 sends micro-batch 1 while rank 1 sends the gradient of micro-batch 0."""
    file = str(tmp_path / "own.csv")
    Path(file).write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", encoding="utf-8")
    engine, profile = build(Config(schedule=file)), contract.profile_of(MODELS["gpt"])
    plan = engine.ordered(Plan.contiguous([1, 1], 2), profile, Cluster(), MemoryModel(), allowed)
    assert engine.notes(plan, profile, Cluster(), MemoryModel()) == []
    (note,) = engine.notes(plan, profile, Cluster(blocking_messages=True), MemoryModel())
    assert note.message.startswith("never ends where messages block: ")
    Path(file).write_text("0F0,,0F1,0B0,0B1\n,1F0,1B0,1F1,1B1\n", encoding="utf-8")
    (note,) = engine.notes(plan, profile, Cluster(blocking_messages=True), MemoryModel())
    assert "SEND_F1 (row 1, column 3)" in note.message, "where the file has it"


def test_a_run_goes_on_with_the_order_that_it_had(tmp_path: Path) -> None:
    """The file was changed: what it says now is another run, with other stages on the devices, maybe."""
    file = tmp_path / "own.csv"
    file.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", encoding="utf-8")
    engine, there = build(Config(schedule=str(file))), (Cluster(), MemoryModel(), allowed)
    plan = engine.ordered(Plan.contiguous([1, 1], 2), contract.profile_of(MODELS["gpt"]), *there)
    file.write_text("0F0,0SEND_F0,,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
                    "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n", encoding="utf-8")  # fmt: skip
    assert engine.ordered(plan, contract.profile_of(MODELS["gpt"]), *there) == plan, "the same passes"
    file.write_text("1F0,1B0,1F1,1B1\n0F0,0F1,0B0,0B1\n", encoding="utf-8")
    with pytest.raises(ProblemError, match=r"own\.csv +has another order than it had"):
        engine.ordered(plan, contract.profile_of(MODELS["gpt"]), *there)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (Config(schedule="search", chunks=0), ("engine.chunks", 0, ["engine.chunks=1"])),
        (
            Config(schedule="1f1b", placement="v"),
            ("engine.placement", "v", ["without engine.placement", "engine.schedule=search"]),
        ),
        (
            Config(schedule="zbv", boundaries="search"),
            ("engine.boundaries", "search", ["without engine.boundaries", "engine.schedule=search"]),
        ),
        (
            Config(schedule="search", boundaries="all"),
            ("engine.boundaries", "all", ["engine.boundaries=planner"]),
        ),
    ],
)
def test_places_and_boundaries_that_do_nothing_are_refused(config: Config, found: Row) -> None:
    assert rows(plug_in.check(config)) == [found]


@pytest.mark.parametrize("schedule", ["search", "all"])
def test_boundaries_are_searched_with_an_order_alone_and_among_all(schedule: str) -> None:
    assert plug_in.check(Config(schedule=schedule, boundaries="search")) == []


@pytest.mark.parametrize("boundaries", ["planner", "search"])
def test_layers_move_to_stages_that_the_model_allows(boundaries: str) -> None:
    """From 1 and 5 layers to 3 and 3, or to 4 and 2 where layers 2 and 3 must be in one stage; not with the planner's
    boundaries, and not in a run that goes on, whose order is there."""
    engine = build(Config(schedule="search", placement="one", boundaries=boundaries))
    profile = ModelProfile((LayerProfile("x", 0.01, 0.02, 8, 8, saved_bytes=8),) * 6, input_bytes=8)
    begun, there = Plan.contiguous([1, 5], 4), (Cluster(devices_per_node=2), MemoryModel())

    def together(plan: Plan) -> list[Problem]:
        return [Problem("model", None, "uses the other's weight")] * (plan.stage_of(2) != plan.stage_of(3))

    free = engine.ordered(begun, profile, *there, allowed)
    tied = engine.ordered(begun, profile, *there, together)
    moved = [(3, 3), (4, 2)] if boundaries == "search" else [(1, 5), (1, 5)]
    assert [free.balance, tied.balance] == moved
    assert engine.ordered(free, profile, *there, allowed) == free


@pytest.mark.parametrize("plug_in", [plug_in, torch_plug_in])
def test_chunks_do_nothing_where_a_file_has_the_stages(plug_in: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("0F0,0B0\n1F0,1B0\n", encoding="utf-8")
    found = plug_in.check(plug_in.Config(schedule=str(tmp_path / "own.csv"), chunks=3))
    assert rows(found) == [("engine.chunks", 3, ["without engine.chunks"])]
    assert plug_in.check(plug_in.Config(schedule=str(tmp_path / "own.csv"))) == []


def test_a_file_with_other_numbers_is_refused(tmp_path: Path) -> None:
    file = str(tmp_path / "own.csv")
    Path(file).write_text("0F0,0B0\n1F0,1B0\n", encoding="utf-8")
    assert refused(PlanRequest(BatchShape(8, 4), 4), file) == [
        ("engine.schedule", file, ["mesh.pipeline=2"]),
        ("engine.schedule", file, ["batch.micro_batches=1"]),
    ]


@pytest.mark.parametrize(
    ("size", "devices", "fixes"),
    [
        (16, 8, ["mesh.pipeline=2", "batch.micro_batches=3 batch.size=15"]),
        (1, 8, ["mesh.pipeline=2", "batch.micro_batches=3 batch.size=3"]),
        (12, 1, ["cluster.devices=2 mesh.pipeline=2", "batch.micro_batches=3"]),
    ],
)
def test_fixes_of_a_file_set_what_they_need(size: int, devices: int, fixes: list[str], tmp_path: Path) -> None:
    file = str(tmp_path / "own.csv")
    Path(file).write_text("0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n", encoding="utf-8")
    for engine in (build(Config(schedule=file)), torch_plug_in.build(torch_plug_in.Config(schedule=file))):
        found = engine.refuses(PlanRequest(BatchShape(size, 4), 1), "float32", Cluster(devices_per_node=devices))
        assert [" ".join(sorted(fix.split())) for row in rows(found) for fix in row[2]] == fixes


def test_its_messages_have_no_complex_numbers() -> None:
    """The transports that it shares with myelin know none: such a plan is refused, instead of a step that fails."""
    assert not build(Config()).capabilities.complex
    assert torch.complex64 not in DTYPES
