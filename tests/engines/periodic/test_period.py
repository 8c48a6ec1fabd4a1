"""The engine keeps a pattern's period. Layers sleep for as long as they are said to take, so that it does not matter
how many cores there are, and who else uses them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engines.periodic.engine import Config, build
from harness.core.plan import Mesh, Plan, Stage
from harness.interfaces import SessionSpec
from harness.run.metrics import period_s
from planners.periodic import one_f_one_b_star
from planners.periodic.layer_ticks import Chain
from tests.engines.networks import Network
from tests.engines.periodic import patterns

pytestmark = pytest.mark.usefixtures("ranks")

UNIT_S = 0.03
"""Next to it a task has half a millisecond of its own, and some more where others use the machine."""
MICRO_BATCHES, STEPS = 10, 4
WITHIN = 0.15


class _Sleeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: int, backward: int) -> Tensor:
        ctx.backward_s = backward * UNIT_S
        time.sleep(forward * UNIT_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradient, None, None


class Sleeper(nn.Module):
    def __init__(self, forward: int, backward: int) -> None:
        super().__init__()
        self.units = forward, backward
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Sleeping.apply(x * self.scale, *self.units)
        return y


def network(forward: Sequence[int], backward: Sequence[int]) -> Network:
    def layers() -> list[nn.Module]:
        return [Sleeper(f, b) for f, b in zip(forward, backward, strict=True)]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return ((output - target) ** 2).sum()

    return Network("sleeping", layers, lambda n: torch.rand(n, 4), lambda n: torch.rand(n, 4), loss)


def measured_s(model: Network, chosen: Plan, wanted_s: float) -> float:
    """The best of a few steps, no more than are needed: others use the machine."""
    spec, found = SessionSpec(("cpu",) * (1 + max(chosen.devices))), float("inf")
    with build(Config(update_every=5)).session(model, chosen, spec) as session:
        for step in range(STEPS):
            session.step(model.sample(MICRO_BATCHES))
            found = min(found, period_s(session.trace().only(step)) or found)
            if found < wanted_s * (1 + WITHIN):
                break
    return found


@pytest.mark.parametrize("devices", [[0, 1], [0, 1, 0]])
def test_stages_that_take_equally_long(devices: list[int]) -> None:
    """One unit forward and two backward on each stage."""
    chosen = patterns.plan([1] * len(devices), MICRO_BATCHES, devices)
    assert chosen.pattern is not None
    times = [patterns.FORWARD] * len(devices), [patterns.BACKWARD] * len(devices)
    wanted_s = chosen.pattern.period_s * UNIT_S
    assert measured_s(network(*times), chosen, wanted_s) == pytest.approx(wanted_s, rel=WITHIN)


def test_a_timing_of_1f1b() -> None:
    """Messages take no time here; the stages take 6 and 7 units, a micro-batch 13."""
    forward, backward = [1, 2, 1, 1], [2, 1, 1, 4]
    cuts, nothing = (0,) * 5, (0,) * 4
    chain = Chain(tuple(forward), tuple(backward), nothing, nothing, cuts, cuts, cuts, memory=1, tick_s=UNIT_S)
    stages = (Stage(0, 1, 0), Stage(2, 3, 1))
    pattern = one_f_one_b_star.timing(chain, stages, 7).pattern()
    chosen = Plan(Mesh(pipeline=2), stages, MICRO_BATCHES, pattern=pattern)
    assert measured_s(network(forward, backward), chosen, 7 * UNIT_S) == pytest.approx(7 * UNIT_S, rel=WITHIN)
