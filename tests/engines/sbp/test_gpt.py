"""GPT against `single`, in float64: planned and random strategies, with everything that a block has."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from engines.sbp.block_layout import Dim, Mesh
from engines.sbp.program import program
from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan
from harness.interfaces import Model
from harness.measure.count_model import count
from harness.sbp.device_grid import Grid
from harness.sbp.matmul_chain import chain_from_profile
from harness.sbp.route_to_plan import grid_from_plan
from harness.sbp.shortest_path import Ends
from models.gpt.config import Config
from models.gpt.gpt import build
from tests.support.sbp_plans import drawn, flat, planned, with_strategies
from tests.support.sbp_runs import ADAM, SGD, Run, check

pytestmark = pytest.mark.usefixtures("ranks")

ENDS: tuple[Ends, ...] = ("free", "batch_split")
LATENCIES_S = (1e-4, 1e-8)
"""Where messages are dear, and where they cost their bytes alone."""
VARIANTS = [(True, 0.0), (False, 0.2), (True, 0.2), (False, 0.0)]
"""Whether the head has the embedding's weight, and the share that dropout zeroes."""


def gpt(devices: int, tied: bool, dropout: float) -> Model:
    heads = max(4, devices)
    return build(
        Config(
            layers=2, hidden=8 * heads, heads=heads, sequence=5, vocabulary=8 * devices, tied=tied, dropout=dropout,
            attention_dropout=dropout,
        )
    )  # fmt: skip


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_as_the_planner_splits_it(devices: int) -> None:
    """Both kinds of ends, links and optimizers, one and two micro-batches; less of it where ranks share few cores."""
    runs, strategies = [], set()
    samples = 2 * devices
    for number, (tied, dropout) in enumerate(VARIANTS[: 4 if devices < 8 else 2]):
        model, m = gpt(devices, tied, dropout), 1 + number % 2
        plan = planned(model, devices, samples, ENDS[number % 2], m, alpha_s=LATENCIES_S[number // 2])
        strategies |= set(plan.strategy.values())
        runs.append(Run(model, plan, samples, (SGD, ADAM)[number // 2], overlap=number != 2))
    assert len(strategies) > 2
    check(runs)


@pytest.mark.parametrize(("nodes", "devices", "plans"), [(1, 2, 2), (1, 4, 1)])
def test_strategies_at_random(nodes: int, devices: int, plans: int) -> None:
    trained_at_random(nodes, devices, plans)


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize(("nodes", "devices", "plans"), [(1, 4, 2), (1, 6, 1), (2, 8, 1)])
def test_strategies_at_random_on_many_ranks(nodes: int, devices: int, plans: int) -> None:
    trained_at_random(nodes, devices, plans)


def trained_at_random(nodes: int, devices: int, plans: int) -> None:
    dice, samples, runs = random.Random(devices), 2 * devices, []
    for tied, dropout in VARIANTS[:2]:
        model = gpt(devices, tied, dropout)
        profiles = {m: count(model, samples // m, "float64") for m in (1, 2)}
        for number in range(plans):
            m = 1 + number % 2
            plan = drawn(profiles[m], devices, dice.choice(ENDS), m, dice, share=0.5, nodes=nodes)
            runs.append(Run(model, plan, samples, (ADAM, SGD)[number % 2]))
    check(runs)


def strided(plan: Plan, profile: ModelProfile) -> bool:
    """Whether something that goes past a branch is moved into rows that are split otherwise than in a row."""
    found = program(plan, chain_from_profile(profile), Mesh(grid_from_plan(plan))).instructions.values()
    rows = [one.past.after.rows for one in found if one.past]
    return any(not row.like(Dim(tuple(axis for axis in row.axes if axis in row.split), row.split)) for row in rows)


DRAWS, SEVERAL = 800, 4
"""Plans among which one of a hundred is such a one, and how many of these are run."""


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize(("nodes", "devices"), [(1, 6), (2, 8)])
def test_branches_whose_rows_lie_in_strides(nodes: int, devices: int) -> None:
    """Digits of several kinds: split by one and inside of it by another, then by that one alone."""
    model, samples = gpt(devices, False, 0.0), 2 * devices
    profile = count(model, samples, "float64")
    plans = (drawn(profile, devices, ENDS[n % 2], 1, random.Random(n), 0.5, nodes) for n in range(DRAWS))
    found = list(islice((plan for plan in plans if strided(plan, profile)), SEVERAL))
    assert len(found) == SEVERAL, f"{len(found)} of {DRAWS} plans are such ones"
    check([Run(model, plan, samples) for plan in found])


@pytest.mark.parametrize("ends", ENDS)
def test_attention_between_two_moves(ends: Ends) -> None:
    """Two heads on four ranks: not whole where qkv leaves, nor where the projection enters."""
    model, grid = build(Config(layers=1, hidden=16, heads=2, sequence=3, vocabulary=8, tied=False)), Grid(1, 4)
    numbers = {"block_0.attention.qkv": (1, 4, 1), "block_0.attention.projection": (1, 1, 4)}
    given = {name: grid.strategy(some) for name, some in numbers.items()}
    plan = with_strategies(count(model, 8, "float64"), flat(4), given, ends)
    leaves, attention = plan.layouts["block_0.attention.qkv"][1:]
    assert leaves == plan.layouts["block_0.attention.projection"][0] == (1,) and attention > (1,)
    check([Run(model, plan, 8)])


@pytest.mark.usefixtures("at_length")
def test_fewer_heads_than_devices_of_several_nodes() -> None:
    """Four heads on two nodes of four devices: heads stay whole where columns were split by digits of both kinds, and
    those of one kind split samples afterwards."""
    model = build(Config(layers=1, hidden=32, heads=4, sequence=3, vocabulary=16, tied=False))
    profile = count(model, 16, "float64")
    plans = [drawn(profile, 8, ENDS[n % 2], 1, random.Random(n), 0.5, nodes=2) for n in range(6)]
    check([Run(model, plan, 16) for plan in plans])
