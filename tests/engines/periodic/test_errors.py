"""Errors end a step at once, with their place, and the next step is as if there had been none."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engines.periodic.engine import Config, build
from harness.interfaces import Batch, OptimizerSpec, SessionSpec
from tests.engines.networks import Network
from tests.engines.periodic.patterns import plan

SPEC = SessionSpec(("cpu",) * 2, OptimizerSpec("sgd", lr=0.1), "float64")


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        if bool((x > 50).any()):
            raise ZeroDivisionError("on purpose")
        return gradient


class Trap(nn.Module):
    """Its backward pass fails on what is larger than 50, its forward pass on what is larger than 5000."""

    def forward(self, x: Tensor) -> Tensor:
        if bool((x > 5000).any()):
            raise ZeroDivisionError("on purpose")
        return _Fails.apply(x)  # type: ignore[no-any-return]


def _loss(output: Tensor, target: Tensor) -> Tensor:
    if bool((target < -50).any()):
        raise ZeroDivisionError("on purpose")
    return ((output - target) ** 2).flatten(1).mean(1).sum()


def network(trap: int) -> Network:
    """Six layers; values stay about as they are, so that a trap sees what comes in."""

    def layers() -> list[nn.Module]:
        found: list[nn.Module] = [nn.Linear(4, 4) for _ in range(6)]
        for layer in found:
            nn.init.eye_(layer.weight)  # type: ignore[arg-type]
        found[trap] = Trap()
        return found

    return Network("trap", layers, lambda n: torch.rand(n, 4), lambda n: torch.rand(n, 4), _loss)


def bad(batch: Batch, micro_batch: int, value: float) -> Batch:
    """The second sample of a micro-batch of two spoils it."""
    inputs, targets = batch.inputs.clone(), batch.targets.clone()
    (inputs if value > 0 else targets)[2 * micro_batch + 1] = value
    return Batch(inputs, targets)


@pytest.mark.parametrize("every", [2, 8])
@pytest.mark.parametrize(
    ("trap", "micro_batch", "value", "note"),
    [
        (1, 3, 100, "in stage 0, layer '1', micro-batch 3, backward"),
        (3, 0, 100, "in stage 1, layer '3', micro-batch 0, backward"),
        (5, 7, 100, "in stage 2, layer '5', micro-batch 7, backward"),
        (3, 5, 10000, "in stage 1, layer '3', micro-batch 5"),
        (0, 6, -100, "in stage 2, the loss, micro-batch 6"),
    ],
)
@pytest.mark.parametrize("devices", [[0, 1, 0], [0, 0, 1]])
def test_an_error_says_where(
    trap: int, micro_batch: int, value: float, note: str, every: int, devices: list[int]
) -> None:
    model = network(trap)
    with build(Config(update_every=every)).session(model, plan([2, 2, 2], 8, devices), SPEC) as session:
        torch.manual_seed(1)
        batch = model.sample(16)
        with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
            session.step(bad(batch, micro_batch, value))
        assert note in caught.value.__notes__
        session.step(batch)


def test_a_synchronous_step_that_failed_changes_nothing() -> None:
    model = network(3)
    torch.manual_seed(1)
    batch = model.sample(16)
    engine, chosen = build(Config(update_every=8)), plan([2, 2, 2], 8, [0, 1, 0])
    losses = []
    for fails in (False, True):
        with engine.session(model, chosen, SPEC) as session:
            if fails:
                with pytest.raises(ZeroDivisionError):
                    session.step(bad(batch, 0, 100), meter=True)
            losses.append([session.step(batch).loss for _ in range(2)])
    assert losses[0] == losses[1]


def test_queues_end_with_the_session() -> None:
    model, before = network(3), threading.active_count()
    with build(Config()).session(model, plan([2, 2, 2], 8), SessionSpec(("cpu",) * 3)) as session:
        session.step(model.sample(16))
        assert threading.active_count() == before + 3 + 4  # devices, and links both ways
    assert threading.active_count() == before
