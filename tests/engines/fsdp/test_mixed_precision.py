"""precision=mixed with batch norms: matmuls in bfloat16, statistics in float32, as `single` has it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.fsdp.engine import Config, build
from harness.interfaces import Batch, Session
from tests.engines import zoo
from tests.engines.contract import Case, gentle
from tests.engines.test_resuming import flat
from tests.support.sessions import run_session

pytestmark = pytest.mark.usefixtures("ranks")

STEPS = 3


def trained(case: Case, batches: list[Batch], autocast: str | None) -> tuple[list[float], dict[str, Tensor]]:
    """The losses, and the statistics of batch norms afterwards."""

    def work(session: Session) -> tuple[list[float], dict[str, Any]]:
        losses = [session.step(batch).loss for batch in batches]
        return losses, session.state_dict()

    losses, state = run_session(case.engine, case.model, case.plan, replace(case.spec, autocast=autocast), work)
    return losses, {name: value for name, value in state["model"].items() if "running" in name}


@pytest.mark.parametrize("group_mb", [0.0, 1.0])
@pytest.mark.parametrize("reduce_each", [True, False])
def test_losses_and_statistics_are_those_of_single(group_mb: float, reduce_each: bool) -> None:
    model = zoo.model("resnet")
    own = gentle(replace(flat(build, Config(group_mb=group_mb, reduce_each=reduce_each), 1, 2, model=model),
                         dtype="float32"))  # fmt: skip
    torch.manual_seed(3)
    batches = [model.sample(own.samples) for _ in range(STEPS)]
    losses, statistics = trained(own, batches, "bfloat16")
    expected, whole = trained(own.reference, batches, "bfloat16")
    exact, _ = trained(own.reference, batches, None)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
    assert max(abs(a - b) for a, b in zip(losses, exact, strict=True)) > 1e-3, "it computes in bfloat16"
    assert statistics.keys() == whole.keys() and {one.dtype for one in statistics.values()} == {torch.float32}


def test_statistics_of_a_step_are_the_mean_over_replicas() -> None:
    """Each replica's are those that `single` has after its share: in float32, where bfloat16 would round by 0.004."""
    model = zoo.model("resnet")
    own = replace(flat(build, Config(), 1, 2, model=model), dtype="float32")
    torch.manual_seed(3)
    batch = model.sample(own.samples)
    _, found = trained(own, [batch], "bfloat16")
    inputs, targets = batch.inputs, batch.targets
    assert isinstance(inputs, Tensor) and isinstance(targets, Tensor)
    alone = replace(own.reference, plan=replace(own.reference.plan, micro_batches=own.plan.micro_batches))
    shares = [trained(alone, [Batch(*share)], "bfloat16")[1]
              for share in zip(inputs.tensor_split(2), targets.tensor_split(2), strict=True)]  # fmt: skip
    expected = {name: (one + shares[1][name]) / 2 for name, one in shares[0].items()}
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
