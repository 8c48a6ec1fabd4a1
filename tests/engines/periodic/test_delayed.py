"""Updates while micro-batches are under way equal a sequential reference, exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engines.periodic.engine import Config, PeriodicEngine
from engines.periodic.versioned_stage import VersionedStage
from harness.core.plan import Plan
from harness.interfaces import OptimizerSpec, SessionSpec
from harness.runtime.training_state import intra_op_threads
from tests.engines import naive_delays, networks
from tests.engines.contract import profile_of
from tests.engines.naive_delays import Pipeline
from tests.engines.periodic.patterns import plan
from tests.support.sessions import run_session
from tests.support.violations import violations

MOMENTUM = OptimizerSpec("sgd", lr=0.05, momentum=0.9, weight_decay=0.01)
ADAM = OptimizerSpec("adam", lr=0.01)
SPEC = SessionSpec(("cpu",) * 4, MOMENTUM, "float64", seed=7)
STEPS = 3
PLANS = {
    "two stages": plan([6, 8], 8),
    "three stages": plan([4, 6, 4], 8),
    "messages that take time": plan([4, 6, 4], 8, slack=2),
    "device 0 has stages 0 and 2": plan([5, 6, 3], 8, devices=[0, 1, 0]),
    "stages 0, 2 and 1, 3": plan([3, 4, 4, 3], 8, devices=[0, 1, 0, 1]),
    "neighbours on a device": plan([3, 4, 4, 3], 8, devices=[0, 0, 1, 0]),
}


def trained(model: networks.Network, chosen: Plan, every: int, spec: SessionSpec, samples: int = 16) -> None:
    """Losses, the gradient of every update, weights and statistics of three steps."""
    torch.manual_seed(3)
    batches = [model.sample(samples) for _ in range(STEPS)]
    with intra_op_threads(1):  # as a queue has: with more, kernels may add up in another order
        want = naive_delays.train(model, spec, batches, Pipeline(chosen.micro_batches, every))
    got = naive_delays.Reported()
    gradients: list[tuple[int, naive_delays.Named]] = []  # with the number of their stage

    def note(stage: VersionedStage) -> None:
        gradients.append((stage.number, {n: p.grad.clone() for n, p in stage.own.items() if p.grad is not None}))

    with PeriodicEngine(Config(update_every=every)).session(model, chosen, spec) as session:
        for stage in session.stages:  # type: ignore[attr-defined]
            stage.optimizer.optimizer.register_step_pre_hook(lambda *_, own=stage: note(own))
        for batch in batches:
            got.losses.append(session.step(batch).loss)
            got.states.append(session.state_dict()["model"])
    torch.testing.assert_close(got.losses, want.losses, rtol=1e-12, atol=0)
    for number in range(len(chosen.stages)):
        own = [gradient for stage, gradient in gradients if stage == number]
        assert len(own) == STEPS * chosen.micro_batches // every
        assert [_wrong(mine, theirs) for mine, theirs in zip(own, want.gradients, strict=True)] == [[]] * len(own)
    assert sum(len(own) for _, own in gradients) == sum(len(own) for own in want.gradients)
    for mine, theirs in zip(got.states, want.states, strict=True):
        assert list(mine) == list(theirs)
        assert _wrong(mine, theirs) == []


def _wrong(mine: naive_delays.Named, theirs: naive_delays.Named) -> list[str]:
    """Names of what is not equal to the last bit."""
    return [name for name, value in mine.items() if not torch.equal(value, theirs[name])]


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=["momentum", "adam"])
@pytest.mark.parametrize("name", PLANS)
def test_skips_with_dropout(name: str, optimizer: OptimizerSpec) -> None:
    trained(networks.skips(), PLANS[name], 4, replace(SPEC, optimizer=optimizer))


@pytest.mark.parametrize("every", [1, 2, 4, 8])
def test_every_number_of_micro_batches(every: int) -> None:
    trained(networks.tokens(), plan([3, 3], 8), every, SPEC)


@pytest.mark.parametrize("devices", [[0, 1, 2], [0, 1, 0]])
def test_running_statistics_follow_the_forward_tasks(devices: list[int]) -> None:
    trained(networks.norms(), plan([3, 4, 3], 8, devices), 4, SPEC)


def test_pairs_of_tensors() -> None:
    trained(networks.pairs(), plan([3, 2, 3], 8), 4, SPEC)


def test_a_group_that_is_smaller() -> None:
    """17 samples in 8 micro-batches: the first group has 9 of them."""
    trained(networks.skips(), PLANS["two stages"], 4, SPEC, samples=17)


def test_a_delayed_step_is_not_a_synchronous_one() -> None:
    """Or the tests above would say nothing."""
    model = networks.tokens()
    torch.manual_seed(3)
    batches = [model.sample(16)]
    states = [
        naive_delays.train(model, SPEC, batches, Pipeline(8, every)).states[0]["0.weight"] for every in (1, 2, 4, 8)
    ]
    assert len({float(state.sum()) for state in states}) == 4


@pytest.mark.parametrize("every", [2, 4])
@pytest.mark.parametrize("name", ["two stages", "device 0 has stages 0 and 2", "neighbours on a device"])
def test_the_trace_is_that_of_the_schedule(name: str, every: int) -> None:
    model, chosen, engine = networks.skips(), PLANS[name], PeriodicEngine(Config(update_every=every))
    schedule = engine.schedule(chosen, profile_of(model))
    steps = [str(op) for op in schedule.ops() if op.kind == "step" and op.stage == 0]
    assert steps == [f"0step{i}" for i in range(every - 1, 8, every)]

    def trace(session):  # type: ignore[no-untyped-def]
        for _ in range(2):
            session.step(model.sample(16))
        return session.trace()

    assert violations(schedule, run_session(engine, model, chosen, SPEC, trace).only(1)) == []
