"""Steps that DeepSpeed leaves out, since a gradient is not finite.

In float16 that happens as a matter of course, and needs a GPU. The same code leaves out a step in float32 and bfloat16.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from harness.interfaces import OptimizerSpec, Session
from tests.engines.deepspeed.cases import SHARDED, case
from tests.support.sessions import run_session

pytestmark = pytest.mark.usefixtures("ranks")

SAID = "gradients are not finite, DeepSpeed skips the optimizer"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("zero", "stages", "data"), SHARDED)
def test_a_skipped_step_is_none_of_the_optimizer(
    zero: int, stages: int, data: int, dtype: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first and the third of four, in the last rank alone: no rank steps, and the log says so."""
    one = replace(case("skips", stages, data, zero, m=2), dtype=dtype, optimizer=OptimizerSpec("adamw", lr=0.01))
    instead = ({"precision.dtype": "bfloat16"},)

    def train(session: Any) -> list[dict[str, Any]]:
        torch.manual_seed(3)
        overflows = session.rank == one.plan.mesh.size - 1
        factor = [float("inf"), 1.0, float("inf"), 1.0]
        weight = list(session.stage.parameters())[-1]
        if overflows:
            weight.register_hook(lambda gradient: gradient * factor[session.steps])
        states = [session.state_dict()]
        for _ in factor:
            reported = session.step(one.model.sample(one.samples)).skipped
            assert bool(reported) == (factor[session.steps - 1] != 1.0)
            assert reported is None or reported.fixes == instead
            states.append(session.state_dict())
        return states

    states = run_session(one.engine, one.model, one.plan, replace(one.spec, instead=instead), train)
    weights = [state["model"]["1.weight"] for state in states]
    same = [torch.equal(before, after) for before, after in pairwise(weights)]
    counted = [{float(moments["step"]) for moments in state["optimizer"].values()} for state in states]
    assert same == [True, False, True, False]
    assert counted == [set(), set(), {1.0}, {1.0}, {2.0}]
    assert [state["step"] for state in states] == [0, 1, 2, 3, 4], "data and dropout continue"
    said = [line for line in capfd.readouterr().out.splitlines() if SAID in line]
    assert said == [f"step 0: {SAID}; 1 skipped so far", f"step 2: {SAID}; 2 skipped so far"]


def test_of_other_steps_nothing_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    one = case("skips", stages=1, data=2, m=2)

    def train(session: Session) -> None:
        session.step(one.model.sample(one.samples))

    run_session(one.engine, one.model, one.plan, one.spec, train)
    assert SAID not in capfd.readouterr().out
