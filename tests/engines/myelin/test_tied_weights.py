"""Copies of a tied weight in a grid of stages and replicas: equal bit for bit, however many replicas there are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engines.myelin.session import MyelinSession
from harness.interfaces import OptimizerSpec
from tests.engines.contract import Case
from tests.engines.myelin.cases import case
from tests.support.sessions import run_session

pytestmark = pytest.mark.usefixtures("ranks")

STEPS, SAVED = 4, 2


def grid(dtype: str, **keys: Any) -> Case:
    """Two stages by three replicas; the embedding is first in its stage, the head last."""
    one = case("gpt", 2, 3, m=1, **keys)
    return replace(one, samples=6, dtype=dtype, optimizer=OptimizerSpec("adamw", lr=0.01))


def trained(one: Case, first: int = 0, start: dict[str, Any] | None = None) -> tuple[list[Tensor], list[float], Any]:
    """Each rank's copy of the embedding after the last step, the losses, and the state after `SAVED` steps."""

    def work(session: Any) -> tuple[list[Tensor], list[float], Any]:
        assert isinstance(session, MyelinSession)
        if start is not None:
            session.load_state_dict(start)
        losses, state = [], None
        for step in range(first, STEPS):
            torch.manual_seed(step)
            losses.append(session.step(one.model.sample(one.samples)).loss)
            if step + 1 == SAVED:
                state = session.state_dict()
        copies: list[Any] = [None] * dist.get_world_size()
        (shared,) = session.tied.copies
        dist.all_gather_object(copies, session.updates.weights()[shared.tie.name])
        return copies, losses, state

    return run_session(one.engine, one.model, one.plan, one.spec, work)


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize(
    ("dtype", "keys"), [("float32", {}), ("bfloat16", {"offload": True, "bsize": 50, "k": 2}), ("float16", {"k": 0})]
)
def test_all_copies_stay_equal_and_a_resumed_run_is_the_same(dtype: str, keys: dict[str, Any]) -> None:
    one = grid(dtype, **keys)
    copies, losses, state = trained(one)
    assert all(torch.equal(copies[0], other) for other in copies[1:])
    again, resumed, _ = trained(one, SAVED, state)
    assert resumed == losses[SAVED:]
    assert all(torch.equal(copies[0], other) for other in again)
