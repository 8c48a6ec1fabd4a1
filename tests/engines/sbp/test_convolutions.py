"""Convolutions split by samples, by output channels and by input channels, against `single`."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from torch import nn

from harness.measure.count_model import count
from harness.sbp.device_grid import Grid
from harness.sbp.matmul_chain import chain_from_profile
from harness.sbp.shortest_path import Ends
from models.classification_model import ClassificationModel
from tests.support.sbp_plans import costs_of, flat, with_strategies
from tests.support.sbp_runs import Run, check

pytestmark = pytest.mark.usefixtures("ranks")

SAMPLES = 4
ENDS: tuple[Ends, ...] = ("free", "batch_split")


class Strided(ClassificationModel):
    """Strides, no padding, kernels that are no squares, dilation, and a norm before a convolution."""

    def __init__(self) -> None:
        super().__init__("strided", (2, 17, 17), 2)

    def layers(self) -> nn.Sequential:
        return nn.Sequential(
            nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
            nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 6, (3, 1))),
            nn.MaxPool2d(2, stride=1),
            nn.Conv2d(6, 4, 1, stride=2),
            nn.Sequential(nn.Conv2d(4, 2, 2, dilation=2), nn.Sigmoid()),
            nn.Sequential(nn.Flatten(), nn.Linear(4, 2)),
        )


def test_every_strategy_of_strided_and_unpadded_ones() -> None:
    """Each of them next to each of its neighbour's; all are legal."""
    model, strategies = Strided(), Grid(1, 2).strategies
    profiles = {m: count(model, SAMPLES // m, "float64") for m in (1, 2)}
    matmuls, costs = chain_from_profile(profiles[2]).matmuls, costs_of(profiles[2], flat(2), 2)
    assert all(costs.strategies(item) == strategies for item in matmuls)
    plans = []
    for number, pair in enumerate(product(strategies, strategies)):
        given = {item.name: pair[n % 2] for n, item in enumerate(matmuls)}
        m = 1 + number // 2 % 2
        plans.append(with_strategies(profiles[m], flat(2), given, ENDS[number % 2], m))
    assert len({pair for plan in plans for pair in pairwise(plan.strategy.values())}) == len(strategies) ** 2 == 9
    check([Run(model, plan, SAMPLES, steps=2) for plan in plans])
