"""What the myelin engine accepts, refuses and says; its memory; half precision."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engines.myelin.config_warnings import CHUNKS, wasted
from engines.myelin.engine import Config, build
from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel, named
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.plan import Mesh, Plan, Stage
from harness.core.problem import Problem
from harness.interfaces import OptimizerSpec, Session
from harness.schedule.builders.myelin import split_into_chunks
from harness.schedule.validate import validation_errors
from tests.engines.contract import Case
from tests.engines.myelin.cases import case, schedule_of
from tests.problems import Row, fixes, row, rows
from tests.support.sessions import run_session

FLAT = Cluster(devices_per_node=8)


def test_a_world_of_mpi_only_where_it_is_the_transport() -> None:
    assert [build(Config(transport=kind)).capabilities.mpi for kind in ("mpi", "torch")] == [True, False]


def test_refuses_stages_in_other_places_and_recomputation_of_whole_stages() -> None:
    stages = (Stage(0, 0, 0), Stage(1, 1, 1), Stage(2, 2, 0))
    plan = Plan(Mesh(pipeline=2), stages, 2, "always")
    profile = ModelProfile(tuple(LayerProfile(str(number)) for number in range(3)))
    moved, again = build(Config()).check(plan, profile, FLAT, MemoryModel())
    assert row(moved) == ("planner", None, ["planner=balance", "planner=contiguous"])
    assert row(again) == ("planner", None, ["engine.checkpoint_every=auto"])


@pytest.mark.parametrize(
    ("config", "grid", "found"),
    [
        (Config(), (2, 1), []),
        (Config(pipeline_limit=4), (2, 1), []),
        (Config(pipeline_limit=5), (2, 1), [("engine.pipeline_limit", 5, ["engine.pipeline_limit=4"])]),
        (Config(pipeline_limit=2), (1, 1), [("engine.pipeline_limit", 2, ["mesh.pipeline=2"])]),
        (
            Config(order="1f1b", pipeline_limit=2),
            (2, 1),
            [("engine.pipeline_limit", 2, ["engine.order=message_driven"])],
        ),
        (
            Config(order="gpipe", policy="alternate"),
            (2, 1),
            [("engine.policy", "alternate", ["engine.order=message_driven"])],
        ),
        (Config(policy="alternate"), (3, 1), []),
        (Config(policy="alternate"), (2, 1), [("engine.policy", "alternate", ["mesh.pipeline=3"])]),
        (Config(policy="alternate"), (1, 1), [("engine.policy", "alternate", ["mesh.pipeline=3"])]),
        (Config(k=2, bsize=9), (1, 2), []),
        (
            Config(k=2, bsize=9),
            (2, 1),
            [("engine.k", 2, ["mesh.data=2"]), ("engine.bsize", 9, ["engine.offload=true"])],
        ),
        (Config(k=0, bsize=9), (1, 2), [("engine.bsize", 9, ["engine.offload=true"])]),
        (Config(k=0, bsize=9, offload=True), (1, 2), []),
        (Config(bsize=9, offload=True), (2, 1), []),
        (Config(loss_scale=8.0), (2, 1), [("engine.loss_scale", 8, ["precision.dtype=float16"])]),
    ],
)
def test_notes_what_does_nothing(config: Config, grid: tuple[int, int], found: list[Row]) -> None:
    pipeline, data = grid
    plan = replace(Plan.contiguous([2] * pipeline, 4), mesh=Mesh(data=data, pipeline=pipeline))
    assert rows(build(config).notes(plan, layers(plan), FLAT, MemoryModel())) == found


def test_notes_ask_for_the_devices_that_they_need() -> None:
    expected = {
        (2, 1): (Config(k=2), "mesh.data=2 cluster.devices=4"),
        (1, 2): (Config(policy="alternate"), "mesh.pipeline=3 cluster.devices=6"),
        (1, 1): (Config(k=2), "mesh.data=2"),
    }
    for (pipeline, data), (config, fix) in expected.items():
        plan = replace(Plan.contiguous([2] * pipeline, 4), mesh=Mesh(data=data, pipeline=pipeline))
        (note,) = build(config).notes(plan, layers(plan), Cluster(devices_per_node=2), MemoryModel())
        assert fixes(note) == [fix]


@pytest.mark.parametrize(
    ("cores", "transport", "stages", "noted"),
    [(0.0, "mpi", 2, True), (2.0, "mpi", 2, False), (0.0, "torch", 2, False), (0.0, "mpi", 1, False)],
    ids=["GPUs", "CPU devices", "NCCL", "one stage"],
)
def test_messages_of_gpus_that_go_through_the_host_are_noted(
    cores: float, transport: str, stages: int, noted: bool
) -> None:
    plan, here = Plan.contiguous([2] * stages, 4), Cluster(devices_per_node=2, name="local", cores=cores)
    found = build(Config(transport=transport)).notes(plan, layers(plan), here, MemoryModel())
    assert rows(found) == [("engine.transport", "mpi", ["engine.transport=torch"])] * noted


def test_a_loss_scale_of_float16_is_no_note() -> None:
    plan = Plan.contiguous([2, 2], 4)
    profile = replace(layers(plan), dtype="float16")
    assert build(Config(loss_scale=8.0)).notes(plan, profile, FLAT, MemoryModel()) == []


def layers(plan: Plan) -> ModelProfile:
    return ModelProfile((LayerProfile(),) * sum(plan.balance))


def test_notes_both_readings_of_the_paper() -> None:
    """48 layers in stages of 30 and 18: the divisors of these nearest to sqrt(48) and to sqrt(48 / 2)."""

    def readings(*stages: int) -> Problem:
        plan = Plan.contiguous(stages, 4)
        (note,) = build(Config(checkpoint_every="auto")).notes(plan, layers(plan), FLAT, MemoryModel())
        return note

    uneven = readings(30, 18)
    assert uneven.numbers == pytest.approx({"optimum": 48**0.5, "printed_optimum": 24**0.5})
    assert fixes(uneven) == ["planner=uniform"], "no one number is right for both stages"
    assert fixes(readings(24, 24)) == ["engine.checkpoint_every=4"]


@pytest.mark.parametrize(
    ("every", "own", "fix"),
    [
        ("auto", 13, "engine.checkpoint_every=5"),
        ("1", 12, "engine.checkpoint_every=4"),
        ("auto", 12, ""),
        ("2", 13, ""),
    ],
)
def test_notes_checkpoints_that_save_nothing(every: str, own: int, fix: str) -> None:
    """13 has no other divisor near sqrt(26): each layer keeps its input, which is all that it would save anyway."""
    plan = Plan.contiguous([own, 26 - own], 8)
    layer = LayerProfile(forward_s=1.0, output_bytes=2**20, saved_bytes=2**20)
    profile = ModelProfile((layer,) * 26, input_bytes=2**20)
    config = Config(checkpoint_every=every)
    found = wasted(config, plan, profile)
    assert rows(found) == [("engine.checkpoint_every", every, [fix])] * bool(fix)
    notes = build(config).notes(plan, profile, FLAT, MemoryModel())
    assert all(problem in notes for problem in found)
    large = replace(profile, layers=(replace(layer, saved_bytes=10 * 2**20),) * 26)
    assert wasted(config, plan, large) == [], "blocks that save much are worth it"


def test_notes_offer_no_checkpoints_where_no_number_saves() -> None:
    """Layers that save nothing: the inputs of any segments come on top."""
    plan = Plan.contiguous([4, 4], 8)
    profile = ModelProfile((LayerProfile(output_bytes=10),) * 8, input_bytes=10)
    (note,) = build(Config(checkpoint_every="2")).notes(plan, profile, FLAT, MemoryModel())
    assert fixes(note) == ["engine.checkpoint_every=never"]


PHI = 1_000_000
ADAM_NAMED, SGD_NAMED, MOMENTUM_NAMED = OptimizerSpec("adam"), OptimizerSpec("sgd"), OptimizerSpec("sgd", momentum=0.9)


def state_bytes(config: Config, dtype: str, optimizer: OptimizerSpec) -> int:
    """Of a device with PHI parameters."""
    width = {"float64": 8, "float32": 4}.get(dtype, 2)
    profile = ModelProfile((LayerProfile("one", param_bytes=PHI * width),), dtype=dtype)
    model = named("auto", optimizer.name, optimizer.momentum)
    found = build(config).memory(model, Mesh(), profile)
    return sum(found.state_parts(profile, [0]).values())


@pytest.mark.parametrize(
    ("keys", "dtype", "optimizer", "expected"),
    [
        ({}, "float16", OptimizerSpec("adamw"), 20 * PHI),
        ({}, "bfloat16", OptimizerSpec("adam"), 20 * PHI),
        ({}, "float16", OptimizerSpec("sgd"), 12 * PHI),
        ({}, "float16", OptimizerSpec("sgd", momentum=0.9), 16 * PHI),
        ({}, "float32", OptimizerSpec("adam"), 16 * PHI),
        ({"offload": True, "bsize": 1000}, "float16", OptimizerSpec("adam"), 4 * PHI + 16 * 1000),
        ({"offload": True, "bsize": 10 * PHI}, "float16", OptimizerSpec("adam"), (4 + 16) * PHI),
        ({"offload": True, "bsize": 1000}, "float16", OptimizerSpec("sgd"), 4 * PHI + 8 * 1000),
        ({"offload": True, "bsize": 1000}, "float32", OptimizerSpec("adam"), 8 * PHI + 16 * 1000),
        ({"offload": True, "bsize": 1000}, "float64", OptimizerSpec("adam"), 16 * PHI + 32 * 1000),
    ],
)
def test_bytes_of_the_model_state(keys: dict[str, int], dtype: str, optimizer: OptimizerSpec, expected: int) -> None:
    """The paper's accounting (section V-B): 20 bytes a parameter, or 4 and 16 x bsize."""
    assert state_bytes(Config(**keys), dtype, optimizer) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bsize", "dtype", "optimizer", "fix"),
    [
        (16_000_000, "float16", ADAM_NAMED, "engine.bsize=62500"),
        (PHI, "bfloat16", SGD_NAMED, "engine.bsize=62500"),
        (PHI - 1, "bfloat16", SGD_NAMED, ""),
        (PHI // 2, "float32", ADAM_NAMED, "engine.bsize=62500"),
        (PHI // 2 - 1, "float32", ADAM_NAMED, ""),
        (PHI // 3 + 1, "float64", MOMENTUM_NAMED, "engine.bsize=62500"),
        (PHI // 3 - 1, "float64", MOMENTUM_NAMED, ""),
        (1, "float32", SGD_NAMED, "engine.offload=false"),
    ],
)
def test_notes_an_offloading_that_saves_nothing(bsize: int, dtype: str, optimizer: OptimizerSpec, fix: str) -> None:
    """Just where the bytes of the state say so; and what is offered for it saves some."""
    config = Config(offload=True, bsize=bsize)
    saves = state_bytes(config, dtype, optimizer) < state_bytes(Config(), dtype, optimizer)
    assert saves == (not fix)
    notes = offloading(config, dtype, optimizer)
    assert rows(notes) == [("engine.offload", True, [fix])] * bool(fix)
    if notes and "engine.bsize" in notes[0].fixes[0]:
        assert offloading(replace(config, bsize=notes[0].fixes[0]["engine.bsize"]), dtype, optimizer) == []


def offloading(config: Config, dtype: str, optimizer: OptimizerSpec) -> list[Problem]:
    """The notes of two stages, of which the second one has PHI parameters."""
    width = {"float64": 8, "float32": 4}.get(dtype, 2)
    profile = ModelProfile((LayerProfile(), LayerProfile("one", param_bytes=PHI * width)), dtype=dtype)
    plan, engine = Plan.contiguous([1, 1], 4), build(config)
    memory = engine.memory(named("auto", optimizer.name, optimizer.momentum), plan.mesh, profile)
    return engine.notes(plan, profile, FLAT, memory)


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({}, []),
        ({"bsize": PHI // 4 - 1}, []),
        ({"bsize": PHI // 4}, [("engine.bsize", 250000, ["engine.bsize=62500"])]),
        ({"bsize": PHI // 4, "offload": True}, []),
        ({"k": 1}, [("engine.k", 1, ["engine.bsize=250000"])]),
        ({"k": 5, "bsize": PHI // 5 - 1}, []),
        ({"k": 5, "bsize": PHI // 5, "offload": True}, [("engine.k", 5, ["engine.bsize=50000"])]),
        ({"k": 0}, [("engine.k", 0, ["engine.bsize=62500"])]),
        ({"k": 0, "bsize": PHI // 4 - 1, "offload": True}, []),
        ({"k": PHI}, []),
    ],
)
def test_notes_chunks_that_hold_a_stage(keys: dict[str, int], found: list[Row]) -> None:
    """Where the schedule has a single chunk; and of what is offered it has several."""
    plan = replace(Plan.contiguous([1], 4), mesh=Mesh(data=2))
    profile = ModelProfile((LayerProfile("one", param_bytes=4 * PHI),))
    config = replace(Config(), **keys)
    notes = build(config).notes(plan, profile, FLAT, MemoryModel())
    assert rows(notes) == found
    for note in notes:
        smaller = note.fixes[0]["engine.bsize"]
        chunks = [len(split_into_chunks(PHI, 4, bsize, config.k or 4)) for bsize in (config.bsize, smaller)]
        assert chunks == [1, CHUNKS]


@pytest.mark.parametrize("keys", [{}, {"order": "1f1b"}, {"order": "gpipe", "k": 0}, {"offload": True, "bsize": 40}])
def test_schedules_are_sound(keys: dict[str, str]) -> None:
    one = case("tied", 3, 2, m=2, **keys)
    assert validation_errors(schedule_of(one), one.plan) == []


ADAM = OptimizerSpec("adamw", lr=0.01)


@pytest.mark.usefixtures("computation")
@pytest.mark.parametrize(
    ("dtype", "optimizer", "keys"),
    [("float16", OptimizerSpec("sgd", lr=0.5), {}), ("bfloat16", ADAM, {"offload": True, "bsize": 100})],
)
def test_half_precision_follows_float32(dtype: str, optimizer: OptimizerSpec, keys: dict[str, int]) -> None:
    """A state has the float32 copies of the weights; losses are those of float32 within the format's digits."""

    def losses(one: Case) -> tuple[list[float], set[torch.dtype]]:
        def work(session: Session) -> tuple[list[float], set[torch.dtype]]:
            torch.manual_seed(3)
            batch = one.model.sample(8)
            found = [session.step(batch).loss for _ in range(6)]
            return found, {value.dtype for value in session.state_dict().get("model", {}).values()}

        return run_session(one.engine, one.model, one.plan, one.spec, work)

    one = replace(case("gpt", 2, 2, m=2, **keys), optimizer=optimizer)
    got, dtypes = losses(replace(one, dtype=dtype))
    want, _ = losses(replace(one, dtype="float32").reference)
    assert dtypes == {torch.float32}
    assert got[-1] < got[0] - 0.1
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


def test_autocast() -> None:
    def losses(one: Case) -> list[float]:
        spec = replace(one.spec, autocast="bfloat16")

        def work(session: Session) -> list[float]:
            torch.manual_seed(3)
            batch = one.model.sample(8)
            return [session.step(batch).loss for _ in range(3)]

        return run_session(one.engine, one.model, one.plan, spec, work)

    one = replace(case("tokens", 2, m=2, checkpoint_every="1"), dtype="float32")
    torch.testing.assert_close(losses(one), losses(one.reference), rtol=1e-3, atol=1e-3)
