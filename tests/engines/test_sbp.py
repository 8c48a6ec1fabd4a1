"""The contract of tests/engines/contract.py for sbp; what it refuses, ranks that fail, memory."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from engines.sbp.engine import Config, build
from engines.sbp.same_plan import Disagreement
from engines.sbp.session import SBPSession
from harness.core.memory_model import MemoryModel, named
from harness.core.plan import Mesh, Plan
from harness.interfaces import Model, OptimizerSpec, Session
from harness.launch.forked_ranks import RankKilled, run_on_ranks
from harness.measure.count_model import count
from harness.sbp.device_grid import Grid
from harness.sbp.matmul_chain import chain_from_profile
from harness.sbp.route_to_plan import device_share
from harness.sbp.shortest_path import Ends
from harness.simulator import simulate
from models.gpt.config import Config as GPTConfig
from models.gpt.gpt import build as build_gpt
from models.mlp.config import Config as MLPConfig
from models.mlp.mlp import build as build_mlp
from models.vgg.config import Config as VGGConfig
from models.vgg.vgg import build as build_vgg
from tests.engines import contract, networks, zoo
from tests.engines.contract import Case, gentle
from tests.problems import Row, rows
from tests.support.sbp_plans import flat, planned, with_strategies
from tests.support.sessions import run_session

pytestmark = pytest.mark.usefixtures("ranks")

MODELS: dict[str, Model] = {
    **networks.ALL,
    **{name: zoo.model(name) for name in ("gpt", "llama", "mlp", "vgg", "amoebanet")},
}
ENDS: dict[int, Ends] = {1: "free", 2: "batch_split"}
"""By the number of micro-batches, so that every model has both of both."""


def case(model: str, devices: int = 2, m: int = 1) -> Case:
    network = MODELS[model]
    found = Case(build(Config()), network, planned(network, devices, 8, ENDS[m], m))
    return found if model in networks.ALL else gentle(found)


EVERY = [(model, m) for model in networks.ALL for m in ENDS]


@pytest.mark.fast
@pytest.mark.parametrize(("model", "m"), EVERY)
def test_trains_like_single(model: str, m: int) -> None:
    contract.check_training(case(model, m=m))


@pytest.mark.parametrize("model", ["tokens", "tied", "gpt", "llama"])
def test_states_move(model: str) -> None:
    contract.check_state_moves(case(model))


TRACED = [("norms", 2, 1), ("gpt", 2, 2), ("llama", 2, 2), ("mlp", 4, 2), ("amoebanet", 2, 1)]


@pytest.mark.parametrize(("model", "devices", "m"), TRACED)
def test_runs_its_schedule(model: str, devices: int, m: int) -> None:
    """Collectives are blocks after the passes, as long as they held up the rank."""
    contract.check_trace(case(model, devices, m))


@pytest.mark.parametrize("layer", [1, 13])
def test_a_crash_reaches_the_caller(layer: int) -> None:
    contract.check_crash(case("skips"), layer)


# -- what is refused ------------------------------------------------------------------------------------------------


def refused(plan: Plan, model: Model, samples: int) -> list[Row]:
    here = replace(flat(8), name="local")
    found = build(Config()).check(plan, count(model, samples, "float64"), here, MemoryModel())
    return rows(found)


@pytest.mark.parametrize("model", MODELS)
def test_accepts_what_it_is_tested_with(model: str) -> None:
    for m in ENDS:
        assert refused(case(model, m=m).plan, MODELS[model], 8 // m) == []


def test_a_plan_without_strategies() -> None:
    plan = replace(Plan.contiguous([len(MODELS["mlp"].layers())]), mesh=Mesh(tensor=2))
    fixes = ["planner=autoddl", "planner=megatron", "planner=data_parallel", "mesh.tensor=1"]
    assert refused(plan, MODELS["mlp"], 8) == [("engine", "sbp", fixes)]


def test_samples_that_do_not_divide() -> None:
    model = build_mlp(MLPConfig(widths=[4, 4, 2, 4, 2, 4]))
    profile, grid = count(model, 4, "float64"), Grid(1, 8)
    numbers = [(4, 2, 1), (4, 1, 2), (4, 1, 2), (2, 2, 2), (2, 4, 1)]
    names = [item.name for item in chain_from_profile(profile).matmuls]
    given = {name: grid.strategy(some) for name, some in zip(names, numbers, strict=True)}
    plan = with_strategies(profile, flat(8), given, "free")
    assert refused(plan, model, 4) == [("mesh.tensor", 8, ["batch.size=8", "mesh.tensor=2"])]


# -- ranks that fail ------------------------------------------------------------------------------------------------

SOON_S = 20.0
"""Far below what a collective waits for, on a machine that is busy."""


def failing(what: Callable[[SBPSession], object], rank: int) -> None:
    """Train on 4 ranks, of which `rank` does `what` in a backward pass, the others inside a collective."""
    four = case("mlp", 4)

    def train(session: Any) -> None:
        batch = four.model.sample(8)
        session.step(batch)
        if dist.get_rank() == rank:
            last = [p for p in session.stage.parameters() if p.dim() > 1][-1]
            last.register_hook(lambda _: what(session))
        session.step(batch)

    run_session(four.engine, four.model, four.plan, four.spec, train)


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_that_is_killed_in_the_middle_of_collectives(rank: int) -> None:
    began = time.monotonic()
    with pytest.raises(RankKilled, match=f"rank {rank} was killed"):
        failing(lambda _: os.kill(os.getpid(), signal.SIGKILL), rank)
    assert time.monotonic() - began < SOON_S


def boom() -> None:
    raise ArithmeticError("on purpose")


@pytest.mark.parametrize("rank", [0, 3])
def test_an_error_in_the_middle_of_collectives_comes_first(rank: int) -> None:
    """Not those of the ranks that lose their connection to this one."""
    began = time.monotonic()
    with pytest.raises(ArithmeticError, match="on purpose"):
        failing(lambda _: boom(), rank)
    assert time.monotonic() - began < SOON_S


def test_ranks_that_disagree_on_the_plan() -> None:
    """They would wait for each other in different collectives: all are reported, before the first one."""
    model, engine, spec = MODELS["mlp"], build(Config()), case("mlp").spec
    profile, grid = count(model, 8, "float64"), Grid(1, 2)
    plans = [with_strategies(profile, flat(2), {"linear_1": grid.strategy(some)}, "free")
             for some in ((1, 2, 1), (1, 1, 2))]  # fmt: skip
    sessions = [engine.session(model, plan, spec) for plan in plans]

    def work() -> None:
        with sessions[dist.get_rank()]:
            raise AssertionError("this must not be reached")

    said = r"strategy of linear_1 is \(1, 2, 1\) in rank 0, \(1, 1, 2\) in rank 1 -> start all of them with the same"
    with pytest.raises(Disagreement, match=said):
        run_on_ranks(2, work, spec.devices)


# -- memory -----------------------------------------------------------------------------------------------------------


def peaks(model: Model, plan: Plan, samples: int) -> tuple[int, int]:
    """Simulated and metered bytes of the fullest device."""
    engine = build(Config())
    sized = Case(engine, model, plan, "float32", optimizer=OptimizerSpec("adam", lr=1e-3), samples=samples)

    def metered(session: Session) -> int:
        batch = model.sample(samples)
        for _ in range(2):
            session.step(batch)
        found = session.step(batch, meter=True).peak_memory_bytes
        assert found
        return found[0]

    profile = count(model, samples // plan.micro_batches, "float32")
    layers = tuple(replace(layer, forward_s=1e-3, backward_s=2e-3) for layer in profile.layers)
    share = device_share(replace(profile, layers=layers), plan, chain_from_profile(profile))
    schedule = engine.schedule(plan, share)
    simulated = simulate(schedule, plan, share, flat(plan.mesh.tensor), named("adam_fp32"))
    return simulated.figures["peak_memory_bytes"][0], run_session(engine, model, plan, sized.spec, metered)


@pytest.mark.parametrize(
    ("model", "samples"),
    [
        (build_mlp(MLPConfig(widths=[512] * 5)), 64),
        (build_gpt(GPTConfig(layers=4, hidden=128, heads=4, sequence=64, vocabulary=512)), 8),
        (build_vgg(VGGConfig(channels=[8, 16, 32], dense=64, size=32)), 16),
    ],
    ids=["mlp", "gpt", "vgg"],
)
@pytest.mark.parametrize(("ends", "m", "alpha_s"), [("free", 1, 1e-4), ("batch_split", 2, 1e-9)])
def test_memory_is_as_simulated(model: Model, samples: int, ends: Ends, m: int, alpha_s: float) -> None:
    """To a quarter: copies that an exchange makes to bring blocks into their order are not simulated."""
    simulated, metered = peaks(model, planned(model, 2, samples, ends, m, "float32", alpha_s), samples)
    assert 0.75 < simulated / metered < 1.25
