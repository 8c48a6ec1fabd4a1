"""A state continues: saved by sbp and loaded by `single`, the other way round, and into other strategies."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from engines.single.engine import Config as SingleConfig
from engines.single.engine import build as build_single
from harness.core.plan import Plan
from harness.measure.count_model import count
from models.gpt.config import Config
from models.gpt.gpt import build
from tests.support.sbp_plans import drawn, on_mesh, planned
from tests.support.sbp_runs import ADAM, SGD, Outcome, Run, alone, check_equal, in_ranks

pytestmark = pytest.mark.usefixtures("ranks")

GPT = build(Config(layers=2, hidden=32, heads=4, sequence=4, vocabulary=16, dropout=0.2))
"""With one weight at both ends."""
DEVICES, SAMPLES = 4, 8
HALF, ALL = 2, 4


def runs() -> list[Run]:
    """Of different strategies."""
    profile = count(GPT, SAMPLES, "float64")
    plans = [drawn(profile, DEVICES, "free", 1, random.Random(1), 0.5),
             planned(GPT, DEVICES, SAMPLES, "batch_split", alpha_s=1e-8), on_mesh(GPT, (2, 2), SAMPLES)]  # fmt: skip
    found = [Run(GPT, plan, SAMPLES, optimizer, steps=ALL) for optimizer in (ADAM, SGD) for plan in plans]
    assert len({tuple(run.plan.strategy.values()) for run in found}) == 3
    return found


def go_on(session: Any, run: Run, state: dict[str, Any]) -> Outcome:
    """From a state after `HALF` of the steps."""
    session.load_state_dict(state)
    steps = [session.step(batch) for batch in run.batches()[HALF:]]
    return Outcome([one.loss for one in steps], [], session.state_dict())


def from_state(states: dict[str, dict[str, Any]]) -> Any:
    return lambda session, run: go_on(session, run, states[str(run)])


@pytest.fixture(scope="module")
def halfway() -> dict[str, dict[str, Any]]:
    """The state of each run after half of the steps."""
    short = [replace(run, steps=HALF) for run in runs()]
    return {str(run): done.state for run, done in zip(short, in_ranks(short), strict=True)}


@pytest.fixture(scope="module")
def straight() -> dict[str, Outcome]:
    return {str(run): done for run, done in zip(runs(), in_ranks(runs()), strict=True)}


def test_a_state_is_that_of_the_unsplit_model(halfway: dict[str, dict[str, Any]]) -> None:
    """Keys, shapes, and the values that `single` has: nothing in it names strategies."""
    for run in runs():
        want = alone(replace(run, steps=HALF))
        got = Outcome(want.losses, [], halfway[str(run)])
        check_equal(got, want, 1e-10)
        assert list(got.state["optimizer"]) == list(want.state["optimizer"])
        assert got.state["step"] == HALF
        for name, value in want.state["model"].items():
            assert (got.state["model"][name].shape, got.state["model"][name].dtype) == (value.shape, value.dtype)


def test_the_same_strategy_goes_on_bit_for_bit(
    halfway: dict[str, dict[str, Any]], straight: dict[str, Outcome]
) -> None:
    for run, got in zip(runs(), in_ranks(runs(), from_state(halfway)), strict=True):
        want = straight[str(run)]
        assert got.losses == want.losses[HALF:]
        check_equal(got, Outcome(got.losses, [], want.state), 0.0)


def test_single_goes_on_from_it(halfway: dict[str, dict[str, Any]]) -> None:
    for run in runs():
        whole = Plan.contiguous([sum(run.plan.balance)])
        with build_single(SingleConfig()).session(GPT, whole, run.spec(1)) as session:
            got = go_on(session, run, halfway[str(run)])
        want = alone(run)
        check_equal(got, Outcome(want.losses[HALF:], [], want.state), 1e-10)


def test_it_goes_on_from_single(straight: dict[str, Outcome]) -> None:
    states = {str(run): alone(replace(run, steps=HALF)).state for run in runs()}
    for run, got in zip(runs(), in_ranks(runs(), from_state(states)), strict=True):
        want = straight[str(run)]
        check_equal(got, Outcome(want.losses[HALF:], [], want.state), 1e-10)


@pytest.mark.usefixtures("at_length")
def test_another_strategy_goes_on_from_it(halfway: dict[str, dict[str, Any]], straight: dict[str, Outcome]) -> None:
    mine = runs()
    swapped = {str(run): halfway[str(replace(run, plan=mine[n ^ 1].plan))] for n, run in enumerate(mine)}
    for run, got in zip(mine, in_ranks(mine, from_state(swapped)), strict=True):
        want = straight[str(run)]
        check_equal(got, Outcome(want.losses[HALF:], [], want.state), 1e-10)


def test_a_rank_has_its_part_alone() -> None:
    """The whole state is put together in rank 0 alone, each weight from all ranks."""

    def sizes(session: Any, run: Run) -> tuple[int, int]:
        session.step(run.batches()[0])
        own = session.local_state()["model"]
        whole = session.state_dict()
        assert bool(whole) == (session.rank == 0)
        return sum(v.numel() for v in own.values()), sum(v.numel() for v in whole.get("model", {}).values())

    own, whole = in_ranks([runs()[0]], sizes)[0]
    assert own < 0.8 * whole
