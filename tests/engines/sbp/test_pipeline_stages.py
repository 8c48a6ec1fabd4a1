"""Pipeline stages whose devices split their products: against engine=single, the simulated bytes and the schedule."""

from __future__ import annotations

from typing import Any

import pytest

from engines.sbp.engine import Config, build
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan
from harness.interfaces import BatchShape, Model, PlanRequest
from harness.launch.forked_ranks import run_on_ranks
from harness.measure.count_model import count
from harness.sbp.matmul_chain import chain_from_profile
from harness.sbp.route_to_plan import device_share
from harness.simulator import simulate
from planners.autoddl.planner import Config as PlannerConfig
from planners.autoddl.planner import build as build_planner
from tests.engines import zoo
from tests.support.sbp_plans import flat
from tests.support.sbp_runs import GENTLE, UNPLANNED, Run, alone, check_equal, train
from tests.support.violations import violations

pytestmark = pytest.mark.usefixtures("ranks")

STAGES, SHARDS, SAMPLES, MICRO_BATCHES = 2, 2, 8, 4
MODELS = ("gpt", "llama", "mlp", "unet", "vgg")
"""Tied weights in two stages; products split otherwise than by samples; skips between stages; convolutions."""


def staged(model: Model) -> tuple[Plan, ModelProfile]:
    """A plan, and the profile of one of its devices."""
    profile = count(model, SAMPLES // MICRO_BATCHES, "float64")
    request = PlanRequest(BatchShape(SAMPLES, MICRO_BATCHES), STAGES, 1, SHARDS)
    plan = build_planner(PlannerConfig()).plan(profile, flat(STAGES * SHARDS), MemoryModel(), request)
    return plan, device_share(profile, plan, chain_from_profile(profile))


@pytest.mark.parametrize("name", MODELS)
def test_stages_of_shards_train_like_single(name: str) -> None:
    model, engine = zoo.model(name), build(Config())
    plan, profile = staged(model)
    assert (len(plan.stages), plan.mesh.tensor) == (STAGES, SHARDS)
    run, devices = Run(model, plan, SAMPLES, GENTLE), STAGES * SHARDS
    session = engine.session(model, plan, run.spec(devices))

    def work() -> Any:
        with session as entered:
            return train(entered, run), entered.trace()

    got, trace = run_on_ranks(devices, work, ("cpu",) * devices)
    check_equal(got, alone(run), 1e-10)
    schedule = engine.schedule(plan, profile)
    expected = simulate(schedule, plan, profile, flat(devices), MemoryModel()).figures["bytes_sent"]
    for sent in got.sent:
        assert {kind: size for kind, size in sent.items() if kind not in UNPLANNED} == expected
    found = [violations(schedule, trace.only(step)) for step in range(run.steps)]
    assert [] in found, found  # a rank may lose its core between a message and the clock; not in every step


def test_stages_alone_need_no_strategies() -> None:
    """A planner of stages says nothing of products: each device has all of its own."""
    model = zoo.model("gpt")
    plan = Plan.contiguous([2, len(model.layers()) - 2], MICRO_BATCHES)
    run = Run(model, plan, SAMPLES, GENTLE)
    session = build(Config()).session(model, plan, run.spec(STAGES))

    def work() -> Any:
        with session as entered:
            return train(entered, run)

    check_equal(run_on_ranks(STAGES, work, ("cpu",) * STAGES), alone(run), 1e-10)
