"""float16: what DeepSpeed does with the scale of the loss. It refuses CPUs, but what they compute is float16, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from harness.interfaces import OptimizerSpec, Session
from tests.engines import contract
from tests.engines.contract import Case
from tests.engines.deepspeed.cases import SHARDED, case
from tests.engines.networks import Network
from tests.support.sessions import run_session

pytestmark = pytest.mark.usefixtures("ranks")

ADAMW = OptimizerSpec("adamw", lr=0.001, weight_decay=0.01)
FIRST = {"value": 2.0**16, "good": 0.0, "hysteresis": 2.0}


@pytest.fixture(autouse=True)
def on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CPU_Accelerator, "is_fp16_supported", lambda self: True)


def loud(zero: int, stages: int, data: int) -> Case:
    """With gradients that overflow float16 until the scale has fallen, for several steps."""
    one = case("tied", stages, data, zero, m=2)
    quiet: Any = one.model
    model = Network("loud", lambda: [*quiet.layers()], quiet._inputs, quiet._targets,
                    lambda output, target: 16 * quiet.loss(output, target))  # fmt: skip
    return replace(one, model=model, dtype="float16", optimizer=ADAMW)


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize(("zero", "stages", "data"), SHARDED)
def test_a_state_goes_on_exactly(zero: int, stages: int, data: int) -> None:
    """Saved while the scale falls and after that; loaded by another session: as without a break, bit for bit."""
    one = loud(zero, stages, data)
    straight = contract.run(one, steps=8)
    scales = [state["loss_scale"] for state in straight.states]
    assert scales[0] == FIRST and scales[8]["value"] < scales[2]["value"], "it is still falling after two steps"
    assert scales[8]["good"] > 0, "and then there are steps"
    for done in (2, 7):
        resumed = contract._resume(one, straight.states[done], skip=done, steps=8 - done)
        assert resumed.losses == straight.losses[done:]
        assert resumed.states[-1]["loss_scale"] == scales[8]
        for name, weight in straight.states[8]["model"].items():
            assert torch.equal(resumed.states[-1]["model"][name], weight), name


def test_a_scale_of_another_engine() -> None:
    """Myelin's says nothing of hysteresis; a state without any leaves the scale alone."""
    one = loud(*SHARDED[0])
    saved = contract.run(one, steps=0).states[0]

    def load(session: Session) -> list[dict[str, float]]:
        found = []
        for scale in ({"value": 8.0, "good": 5.0}, None):
            session.load_state_dict(saved | {"loss_scale": scale})
            found.append(session.state_dict().get("loss_scale"))
        return found

    taken = {"value": 8.0, "good": 5.0, "hysteresis": 2.0}
    assert run_session(one.engine, one.model, one.plan, one.spec, load) == [taken, taken]
