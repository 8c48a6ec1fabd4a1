"""Every strategy of a small MLP against `single`, in float64: losses, weights, optimizer state and bytes."""

from __future__ import annotations

import random

import pytest

from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan
from harness.measure.count_model import count
from harness.sbp.device_grid import Grid
from harness.sbp.matmul_chain import chain_from_profile
from harness.sbp.shortest_path import Ends
from models.mlp.config import Config
from models.mlp.mlp import build
from tests.support.sbp_plans import drawn, flat, with_strategies
from tests.support.sbp_runs import ADAM, SGD, Run, check

pytestmark = pytest.mark.usefixtures("ranks")

MLP = build(Config(widths=[24, 48, 24, 48]))
SAMPLES = 48
ENDS: tuple[Ends, ...] = ("free", "batch_split")


def profiles() -> dict[int, ModelProfile]:
    return {m: count(MLP, SAMPLES // m, "float64") for m in (1, 2)}


def run(plan: Plan, number: int) -> Run:
    return Run(MLP, plan, SAMPLES, (SGD, ADAM)[number % 2], overlap=number % 3 > 0)


@pytest.mark.usefixtures("at_length")
def test_every_strategy_on_eight_ranks_in_every_layer() -> None:
    """The ten of each layer, once next to others and once equal in all layers."""
    profile = profiles()
    names = [item.name for item in chain_from_profile(profile[1]).matmuls]
    strategies = Grid(1, 8).strategies
    assert (len(names), len(strategies)) == (3, 10)
    given = [dict.fromkeys(names, strategy) for strategy in strategies]
    different = [(k, (3 * k + 1) % 10, (7 * k + 2) % 10) for k in range(10)]
    given += [{name: strategies[k] for name, k in zip(names, ks, strict=True)} for ks in different]
    plans = []
    for number, some in enumerate(given):
        m = 1 + number // 2 % 2
        plans.append(with_strategies(profile[m], flat(8), some, ENDS[number % 2], m))
    for name in names:
        assert len({plan.strategy[name] for plan in plans[10:]}) == 10
    check([run(plan, number) for number, plan in enumerate(plans)])


@pytest.mark.parametrize(("devices", "plans"), [(2, 3), (3, 3), (4, 6)])
def test_strategies_at_random(devices: int, plans: int) -> None:
    """A matmul may have any strategy next to any other."""
    trained_at_random(devices, plans)


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize(("devices", "plans"), [(6, 6), (8, 6)])
def test_strategies_at_random_on_many_ranks(devices: int, plans: int) -> None:
    trained_at_random(devices, plans)


def trained_at_random(devices: int, plans: int) -> None:
    dice, profile = random.Random(devices), profiles()
    runs = []
    for number in range(plans):
        m = dice.choice((1, 2))
        runs.append(run(drawn(profile[m], devices, dice.choice(ENDS), m, dice, share=1.0), number))
    check(runs)


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("nodes", [2, 4])
def test_nodes_of_several_devices(nodes: int) -> None:
    """A factor may lie across nodes, inside of them, or both; its digits are of two kinds."""
    dice, profile, cluster = random.Random(nodes), profiles()[1], flat(8, nodes=nodes)
    names = [item.name for item in chain_from_profile(profile).matmuls]
    strategies = Grid(nodes, 8 // nodes).strategies
    given = [{name: dice.choice(strategies) for name in names} for _ in range(4)]
    plans = [with_strategies(profile, cluster, one, ENDS[n % 2]) for n, one in enumerate(given)]
    assert all(len(numbers) == 6 for plan in plans for numbers in plan.strategy.values())
    check([run(plan, number) for number, plan in enumerate(plans)])
