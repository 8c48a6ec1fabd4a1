"""engine.local_statistics: batch norms as replicas have them. What all devices gather otherwise is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from engines.ddp.engine import Config as DDPConfig
from engines.ddp.engine import build as build_ddp
from engines.sbp.engine import Config, build
from harness.core.memory_model import MemoryModel
from harness.core.plan import Mesh, Plan
from harness.interfaces import BatchShape, Engine, PlanRequest, Session
from harness.launch.forked_ranks import run_session_on_ranks
from harness.measure.count_model import count
from models.classification_model import ClassificationModel
from planners import data_parallel
from tests.support.sbp_plans import flat
from tests.support.sbp_runs import Outcome, Run, alone, check_equal, train

pytestmark = pytest.mark.usefixtures("ranks")

SAMPLES, RANKS, NORMS = 8, 2, 2


class Normed(ClassificationModel):
    def __init__(self) -> None:
        super().__init__("normed", (3, 6, 6), 4)

    def layers(self) -> nn.Sequential:
        return nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
            nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU()),
            nn.Sequential(nn.Flatten(), nn.Linear(24, 4)),
        )


def by_samples(micro_batches: int) -> Run:
    """Every matmul split by samples alone."""
    model = Normed()
    profile = count(model, SAMPLES // micro_batches, "float64")
    request = PlanRequest(BatchShape(SAMPLES, micro_batches), 1, 1, RANKS)
    planner = data_parallel.build(data_parallel.Config())
    return Run(model, planner.plan(profile, flat(RANKS, 1e-6), MemoryModel(), request), SAMPLES)


def trained(engine: Engine, run: Run, plan: Plan) -> tuple[Outcome, dict[str, int]]:
    """Three steps, and the collectives of one more."""

    def steps(session: Session) -> tuple[Outcome, dict[str, int]]:
        return train(session, run), session.step(run.batches()[0]).collectives

    opened = engine.session(run.model, plan, run.spec(RANKS))
    return run_session_on_ranks(opened, steps, RANKS, ("cpu",) * RANKS)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_losses_and_states_are_those_of_replicas(micro_batches: int) -> None:
    """A device's running statistics are of its own samples, the state's are the means over all devices."""
    run = by_samples(micro_batches)
    replicas = replace(Plan.contiguous([len(run.model.layers())], micro_batches), mesh=Mesh(data=RANKS))
    wanted, _ = trained(build_ddp(DDPConfig()), run, replicas)
    local, calls = trained(build(Config(local_statistics=True)), run, run.plan)
    assert not [kind for kind in calls if kind.endswith("@statistics")]
    if micro_batches > 1:  # replicas see them in another order, which running statistics depend on
        for state in (local.state["model"], wanted.state["model"]):
            for name in [name for name in state if "running" in name]:
                del state[name]
    check_equal(local, wanted, 1e-12)


def test_by_default_all_samples_count_and_each_norm_gathers_twice() -> None:
    run = by_samples(2)
    exact, calls = trained(build(Config()), run, run.plan)
    check_equal(exact, alone(run), 1e-12)
    assert calls["all_gather@statistics"] == 2 * NORMS * run.plan.micro_batches
    assert calls["all_reduce@small parameters"] == 1


def test_local_statistics_have_no_cost_of_exchanges():
    profile = count(Normed(), 4, "float64")
    assert [layer.norms for layer in profile.layers] == [1, 1, 0] and profile.layers[0].norm_bytes == 4 * 4 * 16 * 8
    plan = by_samples(1).plan
    assert build(Config()).layers(plan, profile) is profile
    local = build(Config(local_statistics=True)).layers(plan, profile)
    assert not any(layer.norms or layer.norm_bytes for layer in local.layers)
    assert [replace(one, norms=0, norm_bytes=0) for one in profile.layers] == [*local.layers]
