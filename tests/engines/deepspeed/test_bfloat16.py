"""bfloat16: DeepSpeed steps a float32 copy of the weights, which trains on and is what a state holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.interfaces import OptimizerSpec, Session
from tests.engines import contract
from tests.engines.contract import Case, Outcome
from tests.engines.deepspeed.cases import SHARDED, case
from tests.support.sessions import run_session

pytestmark = pytest.mark.usefixtures("ranks")

ADAMW = OptimizerSpec("adamw", lr=0.001, weight_decay=0.01)
UNIT = 2.0**-8
"""Half the distance from 1 to the next bfloat16: what one rounding may be wrong by."""


def short(model: str, zero: int, stages: int, data: int, optimizer: OptimizerSpec) -> Case:
    return replace(case(model, stages, data, zero, m=2), dtype="bfloat16", optimizer=optimizer)


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize(("zero", "stages", "data"), SHARDED)
@pytest.mark.parametrize("model", ["tied", "gpt"])
def test_it_stays_close_to_single(model: str, zero: int, stages: int, data: int) -> None:
    """From the same weights: losses to 2 roundings, how far all weights have moved in three steps to 8 of them.

    A replica, a micro-batch or a copy of the tied weight whose gradient is lost changes that by far more.
    """
    got = short(model, zero, stages, data, OptimizerSpec("sgd", lr=0.1, momentum=0.9))
    mine = contract.run(got)
    theirs = contract.run(replace(got.reference, dtype="float32"), start=mine.states[0])
    torch.testing.assert_close(mine.losses, theirs.losses, rtol=2 * UNIT, atol=0.0)
    way = moved(theirs)
    assert torch.linalg.vector_norm(moved(mine) - way) < 8 * UNIT * torch.linalg.vector_norm(way)
    rounded = contract.run(got.reference, start=mine.states[0])
    torch.testing.assert_close(mine.losses, rounded.losses, rtol=2 * UNIT, atol=0.0)


def moved(outcome: Outcome) -> Tensor:
    """All weights after the last step minus those before the first."""
    first, last = outcome.states[0]["model"], outcome.states[-1]["model"]
    return torch.cat([(last[name] - value).flatten() for name, value in first.items()])


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize(("zero", "stages", "data"), SHARDED)
def test_a_state_goes_on_exactly(zero: int, stages: int, data: int) -> None:
    """Saved after two steps, loaded by another session, trained two more: as without a break, bit for bit."""
    one = short("tied", zero, stages, data, ADAMW)
    straight = contract.run(one, steps=4)
    resumed = contract._resume(one, straight.states[2], skip=2, steps=2)
    assert resumed.losses == straight.losses[2:]
    assert differences(resumed.states[-1], straight.states[-1]) == []


def test_a_state_moves_between_all_of_them_unchanged() -> None:
    written = contract.run(short("tied", *SHARDED[0], ADAMW), steps=2).states[-1]
    weights = [value for name, value in written["model"].items() if not name.endswith("cache")]
    assert {weight.dtype for weight in weights} == {torch.float32}
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in weights), "as exact as that"
    for zero, stages, data in SHARDED[1:]:

        def load(session: Session) -> dict[str, Any]:
            session.load_state_dict(written)
            return session.state_dict()

        other = short("tied", zero, stages, data, ADAMW)
        assert differences(run_session(other.engine, other.model, other.plan, other.spec, load), written) == []


def differences(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """What is not the same in two states."""
    assert mine["step"] == theirs["step"]
    assert mine["model"].keys() == theirs["model"].keys()
    assert mine["optimizer"].keys() == theirs["optimizer"].keys()
    wrong = [name for name, value in theirs["model"].items() if not torch.equal(mine["model"][name], value)]
    for name, state in theirs["optimizer"].items():
        found = mine["optimizer"][name]
        wrong += [f"{key} of {name}" for key, value in state.items() if not torch.equal(found[key], value)]
    return wrong


def test_other_engines_take_its_state() -> None:
    """They round the weights, as they would have at the start."""
    one = short("tied", 1, 2, 1, ADAMW)
    state = contract.run(one, steps=2).states[-1]
    taken = contract.run(one.reference, steps=0, start=state).states[0]["model"]
    for name, value in state["model"].items():
        assert torch.equal(taken[name], value.bfloat16()), name


def test_small_steps_add_up() -> None:
    """Each is too small for bfloat16: `single`, which has no other weights, gets nowhere."""
    tiny = short("skips", 1, 2, 1, OptimizerSpec("sgd", lr=1e-4))

    def gain(session: Session) -> float:
        torch.manual_seed(3)
        batch = tiny.model.sample(tiny.samples)
        losses = [session.step(batch).loss for _ in range(40)]
        return losses[0] - losses[-1]

    gains = [run_session(one.engine, one.model, one.plan, one.spec, gain) for one in (tiny, tiny.reference)]
    assert gains[0] > 0 == gains[1]
