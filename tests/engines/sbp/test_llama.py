"""Llama against `single`, in float64: planned, Megatron's and random strategies on several meshes, and what of it is
one matmul: its heads are split where those of keys are, its gate and up in the same way."""

from __future__ import annotations

import random

import pytest

from harness.core.memory_model import MemoryModel
from harness.core.plan import Plan
from harness.interfaces import BatchShape, Model, PlanRequest
from harness.measure.count_model import count
from harness.sbp.device_grid import Grid
from harness.sbp.shortest_path import Ends
from models.llama.config import Config
from models.llama.llama import build
from planners.megatron import Config as MegatronConfig
from planners.megatron import build as build_megatron
from tests.support.sbp_plans import drawn, flat, planned, with_strategies
from tests.support.sbp_runs import ADAM, SGD, Run, check

pytestmark = pytest.mark.usefixtures("ranks")

ENDS: tuple[Ends, ...] = ("free", "batch_split")
TOGETHER = [
    "block_0.attention.query+key+value", "block_0.attention.projection", "block_0.mlp.gate+up", "block_0.mlp.down"
]  # fmt: skip
"""The matmuls of a block."""


def llama(devices: int, kv_heads: int = 2, tied: bool = False) -> Model:
    heads = max(4, devices)
    return build(
        Config(
            layers=2, width=4 * heads, heads=heads, kv_heads=kv_heads, hidden=6 * devices, sequence=5,
            vocabulary=8 * devices, tied=tied,
        )
    )  # fmt: skip


def megatron(model: Model, devices: int, samples: int, micro_batches: int = 1, dimensions: int = 2) -> Plan:
    profile = count(model, samples // micro_batches, "float64")
    request = PlanRequest(BatchShape(samples, micro_batches), 1, 1, devices)
    return build_megatron(MegatronConfig(dimensions=dimensions)).plan(profile, flat(devices), MemoryModel(), request)


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_as_the_planner_splits_it(devices: int) -> None:
    """Both kinds of ends and optimizers, one and two micro-batches, with and without a tied head."""
    runs, samples = [], 2 * devices
    for number in range(4 if devices < 8 else 2):
        model = llama(devices, (2, 4)[number % 2], tied=number % 2 == 0)
        plan = planned(model, devices, samples, ENDS[number % 2], 1 + number % 2, alpha_s=(1e-4, 1e-8)[number // 2])
        runs.append(Run(model, plan, samples, (SGD, ADAM)[number // 2], overlap=number != 2))
    check(runs)


@pytest.mark.usefixtures("computation")
@pytest.mark.fast
@pytest.mark.parametrize(("devices", "kv_heads"), [(2, 2), (4, 4)])
@pytest.mark.usefixtures("computation")
def test_megatron_splits_gate_and_up_by_columns_and_heads_by_those_of_keys(devices: int, kv_heads: int) -> None:
    model, samples = llama(devices, kv_heads), 2 * devices
    plan = megatron(model, devices, samples, 2, dimensions=1)
    assert [plan.strategy[name] for name in TOGETHER] == [(1, devices, 1), (1, 1, devices)] * 2
    check([Run(model, plan, samples)])


def test_megatron_keeps_heads_of_keys_whole() -> None:
    """Two heads of keys on four devices, or one: not more than so many of them split columns."""
    runs = []
    for kv_heads in (2, 1):
        plan = megatron(llama(4, kv_heads), 4, 8)
        assert all(plan.strategy[name][0] >= 4 // kv_heads for name in TOGETHER)
        runs.append(Run(llama(4, kv_heads), plan, 8))
    profile = count(llama(2, 1), 4, "float64")
    given = {name: Grid(1, 2).strategy((1, 2, 1) if n % 2 == 0 else (1, 1, 2)) for n, name in enumerate(TOGETHER)}
    check(runs)
    check([Run(llama(2, 1), with_strategies(profile, flat(2), given, "free"), 4)])


@pytest.mark.parametrize(("nodes", "devices", "plans"), [(1, 2, 2), (1, 4, 1)])
def test_strategies_at_random(nodes: int, devices: int, plans: int) -> None:
    trained_at_random(nodes, devices, plans)


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize(("nodes", "devices", "plans"), [(1, 2, 3), (1, 4, 3), (1, 6, 2), (2, 8, 2)])
def test_strategies_at_random_on_many_ranks(nodes: int, devices: int, plans: int) -> None:
    trained_at_random(nodes, devices, plans)


def trained_at_random(nodes: int, devices: int, plans: int) -> None:
    dice, samples, runs = random.Random(devices), 2 * devices, []
    for tied in (True, False):
        model = llama(devices, devices, tied)
        for number in range(plans):
            m = 1 + number % 2
            profile = count(model, samples // m, "float64")
            plan = drawn(profile, devices, dice.choice(ENDS), m, dice, share=0.5, nodes=nodes)
            runs.append(Run(model, plan, samples, (ADAM, SGD)[number % 2]))
    check(runs)


@pytest.mark.parametrize("ends", ENDS)
def test_attention_between_two_moves(ends: Ends) -> None:
    """Two heads of keys on four ranks: not whole where the queries leave, nor where the projection enters."""
    model, grid = llama(4, 2), Grid(1, 4)
    numbers = {TOGETHER[0]: (1, 4, 1), TOGETHER[1]: (1, 1, 4)}
    given = {name: grid.strategy(some) for name, some in numbers.items()}
    plan = with_strategies(count(model, 8, "float64"), flat(4), given, ends)
    leaves, attention = plan.layouts[TOGETHER[0]][1:]
    assert leaves == plan.layouts[TOGETHER[1]][0] == (1,) and attention > (1,)
    check([Run(model, plan, 8)])
