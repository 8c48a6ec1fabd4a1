"""What a plan makes each device do: every exchange begins where the one before ended, factors are those of the plan."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.sbp.block_layout import Layout, Mesh
from engines.sbp.instruction import Instruction, Program, Unrunnable, undivided
from engines.sbp.program import program
from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan
from harness.measure.count_model import count
from harness.sbp.device_grid import Grid
from harness.sbp.matmul_chain import Attention, Chain, Matmul, Residual, chain_from_profile
from harness.sbp.route_to_plan import OUTPUT, grid_from_plan
from harness.sbp.shortest_path import Ends
from models.gpt.config import Config as GPTConfig
from models.gpt.gpt import build as build_gpt
from models.llama.config import Config as LlamaConfig
from models.llama.llama import build as build_llama
from models.mlp.config import Config as MLPConfig
from models.mlp.mlp import build as build_mlp
from tests.support.sbp_plans import drawn, flat, with_strategies
from tests.tiers import examples

ENDS: tuple[Ends, ...] = ("free", "batch_split")


@cache
def profile(name: str) -> ModelProfile:
    if name == "mlp":
        return count(build_mlp(MLPConfig(widths=[24, 48, 24, 48])), 24, "float32")
    if name == "llama":
        keys = LlamaConfig(layers=2, width=96, heads=8, kv_heads=4, hidden=48, sequence=3, vocabulary=48)
        return count(build_llama(keys), 24, "float32")
    heads = 4 if name == "gpt, few heads" else 24
    size = GPTConfig(layers=2, hidden=48, heads=heads, sequence=3, vocabulary=48, tied=name == "gpt")
    return count(build_gpt(size), 24, "float32")


def written(plan: Plan, chain: Chain) -> tuple[Program, Mesh]:
    mesh = Mesh(grid_from_plan(plan))
    return program(plan, chain, mesh), mesh


def check_sizes(one: Instruction, plan: Plan, mesh: Mesh) -> None:
    """p0, p1 and p2 are the plan's, and between them have every digit once."""
    p0, p1, p2 = (mesh.grid.size(degree) for degree in mesh.grid.strategy(plan.strategy[one.item.name]))
    assert mesh.size(one.replicas) == p0 and mesh.size(one.outputs.split) == p1
    assert mesh.size(one.inputs.split) == p2
    digits = [*one.replicas, *one.outputs.split, *one.inputs.split]
    assert sorted(digits) == list(mesh.all)
    enters, leaves, *_ = plan.layouts[one.item.name]
    if enters and not one.item.look_up:
        assert mesh.size(one.arrives.rows.split) == enters[0]
    assert mesh.size(one.leaves.rows.split) == leaves[0]
    assert (one.gather is None) == (p1 == 1 or not enters or one.item.look_up)
    assert (one.scatter is None) == (p2 == 1)


def check_exchanges(one: Instruction) -> None:
    """Each takes its digits away, adds them, or moves them to the other side, and nothing else."""
    for exchange in (one.before, one.gather, one.scatter, one.after, one.past, one.on):
        if exchange is None:
            continue
        before, after = exchange.before, exchange.after
        rows, columns = before.rows.split ^ after.rows.split, before.columns.split ^ after.columns.split
        digits = set(exchange.digits)
        assert digits and not before.rows.split & before.columns.split and not after.rows.split & after.columns.split
        if exchange.name == "all_to_all":
            assert rows == columns == digits
        else:
            assert rows | columns == digits and not rows & columns
            there = after if exchange.name == "reduce_scatter" else before
            assert digits <= there.rows.split | there.columns.split
        assert exchange.reversed.reversed == exchange


def check_row(one: Instruction, at: Layout) -> Layout:
    """From where the product before has ended through its exchanges; where it ends."""
    for exchange in (one.before, one.gather):
        if exchange:
            assert exchange.before == at
            at = exchange.after
        if exchange is one.before:
            assert one.item.look_up or at == one.arrives
    inside = at.columns.split if not one.item.look_up else frozenset(one.inputs.split)
    assert inside == one.inputs.split
    at = Layout(at.rows, one.outputs)
    if one.scatter:
        assert one.scatter.before == at
        at = one.scatter.after
    assert at == one.leaves
    if one.after:
        assert one.after.before == at
        at = one.after.after
    assert at == one.output_layout
    return at


def check_chain(found: Program, chain: Chain) -> None:
    at, rows = found.start, [item.items if isinstance(item, Residual) else (item,) for item in chain.items]
    for number, row in enumerate(rows):
        past, residual = at, isinstance(chain.items[number], Residual)
        matmuls = [item for item in row if isinstance(item, Matmul)]
        for item in matmuls:
            at = check_row(found.instructions[item.name], at)
        last = found.instructions[matmuls[-1].name] if matmuls else None
        if residual and last:
            if last.past:
                assert last.past.before.like(past)
                past = last.past.after
            assert past.like(at), "both terms have the same layout"
        if last and last.on:
            assert last.on.before == at
            at = last.on.after
    assert at == found.end or list(found.instructions.values())[-1].on


@pytest.mark.usefixtures("computation")
@pytest.mark.parametrize(("nodes", "devices"), [(1, 6), (2, 8), (2, 12)])
@pytest.mark.parametrize("name", ["gpt, few heads", "llama"])
def test_every_part_of_a_block_that_attention_reads_is_of_whole_heads(name: str, nodes: int, devices: int) -> None:
    """Also where digits of several kinds split its columns, some of which split samples afterwards."""
    chain, moved = chain_from_profile(profile(name)), 0
    heads = {attention.heads for attention in chain.attentions}
    assert heads == {4}
    for seed in range(100):
        plan = drawn(profile(name), devices, ENDS[seed % 2], 1, random.Random(seed), 0.5, nodes)
        found, mesh = written(plan, chain)
        check_chain(found, chain)
        for one in found.instructions.values():
            if one.attended:
                assert 4 % mesh.size(one.output_layout.columns.cut) == 0
                moved += one.after is not None
    assert moved > 3


@settings(max_examples=examples(60), deadline=None)
@given(
    st.sampled_from(["mlp", "gpt", "gpt, untied", "gpt, few heads"]), st.sampled_from([1, 2, 4, 6, 8]),
    st.sampled_from(ENDS), st.integers(0, 2**32), st.sampled_from([0.3, 0.6, 1.0]),
)  # fmt: skip
def test_blocks_go_from_hand_to_hand(name: str, devices: int, ends: Ends, seed: int, share: float) -> None:
    if name != "mlp":
        share = min(share, 0.6)
    plan = drawn(profile(name), devices, ends, 1, random.Random(seed), share)
    chain = chain_from_profile(profile(name))
    found, mesh = written(plan, chain)
    assert list(found.instructions) == [item.name for item in chain.matmuls]
    for one in found.instructions.values():
        check_sizes(one, plan, mesh)
        check_exchanges(one)
        assert one.heads in (0, 4, 24)
        assert not one.heads or one.heads % mesh.size(one.output_layout.columns.cut) == 0
    check_chain(found, chain)
    if OUTPUT in plan.layouts:
        assert found.end.rows.split == set(mesh.all)
    assert undivided(found, mesh) == []
    assert {exchange.digits for exchange in exchanges(found)} == found.groups


def exchanges(found: Program) -> list:  # type: ignore[type-arg]
    return [
        exchange for one in found.instructions.values()
        for exchange in (one.before, one.gather, one.scatter, one.after, one.past, one.on) if exchange
    ]  # fmt: skip


@settings(max_examples=examples(30), deadline=None)
@given(st.sampled_from([2, 4, 6, 8]), st.integers(0, 2**32))
def test_one_weight_is_split_once(devices: int, seed: int) -> None:
    """The head's columns are the embedding's rows: the same block of the one weight that both have."""
    plan = drawn(profile("gpt"), devices, "free", 1, random.Random(seed), 0.4)
    found, mesh = written(plan, chain_from_profile(profile("gpt")))
    first, last = found.instructions["embedding"], found.instructions["head"]
    for rank in range(devices):
        for mine, theirs, size in ((first.inputs, last.outputs, 48), (first.outputs, last.inputs, 48)):
            assert list(mine.mine(size, mesh, rank)) == list(theirs.mine(size, mesh, rank))


# -- what is refused ------------------------------------------------------------------------------------------------


def of_mlp(numbers: tuple[int, int, int] = (2, 2, 2)) -> tuple[Plan, Chain]:
    found = profile("mlp")
    chain = chain_from_profile(found)
    strategy = Grid(1, 8).strategy(numbers)
    return with_strategies(found, flat(8), {item.name: strategy for item in chain.matmuls}, "free"), chain


def test_a_product_of_which_the_plan_says_nothing() -> None:
    plan, chain = of_mlp()
    plan = replace(plan, layouts={name: place for name, place in plan.layouts.items() if name != "linear_1"})
    with pytest.raises(Unrunnable, match="the plan says nothing of linear_1"):
        written(plan, chain)


def test_a_place_that_the_strategy_does_not_lead_to() -> None:
    """From p0 = 2 and p2 = 2 a reduce-scatter leads to rows in 2 or 4, not in 8."""
    plan, chain = of_mlp()
    enters, _ = plan.layouts["linear_2"]
    plan = replace(plan, layouts={**plan.layouts, "linear_2": (enters, (8,))})
    with pytest.raises(Unrunnable, match="linear_2: the layout of its output differs"):
        written(plan, chain)


def test_heads_that_are_nowhere_whole() -> None:
    """Two heads on eight devices: after qkv features are split by 8, and so they are before the projection."""
    found = profile("gpt, untied")
    all_columns = Grid(1, 8).strategy((1, 8, 1))
    names = ("block_0.attention.qkv", "block_0.attention.projection")
    plan = with_strategies(found, flat(8), dict.fromkeys(names, all_columns), "free")
    chain = chain_from_profile(found)
    written(plan, chain)
    with pytest.raises(Unrunnable, match=r"no layout after block_0\.attention\.qkv keeps 2 attention heads whole"):
        written(plan, Chain(tuple(map(two_heads, chain.items)), chain.element_bytes))


def two_heads(item: object) -> object:
    if isinstance(item, Residual):
        return replace(item, items=tuple(map(two_heads, item.items)))
    return replace(item, heads=2) if isinstance(item, Attention) else item


def test_one_weight_that_two_products_split_differently() -> None:
    """Turned, (2, 4, 1) is (2, 1, 4)."""
    found = profile("gpt")
    plan = drawn(found, 8, "free", 1, random.Random(1), 0.3)
    plan = replace(plan, strategy={**plan.strategy, "embedding": (2, 4, 1), "head": (2, 4, 1)},
                   layouts={**plan.layouts, "embedding": ((), (2,)), "head": ((2,), (2,))})  # fmt: skip
    with pytest.raises(Unrunnable, match="head splits the tied weight in another way than embedding"):
        written(plan, chain_from_profile(found))


@pytest.mark.parametrize(
    ("layouts", "said"),
    [
        (((), (4,), (2,)), "the model begins with a residual branch"),
        (((), (4,)), "the model begins with a residual branch"),
        (((), (4,), (1,)), r"a\.b: the layout of its output differs from that of the residual"),
    ],
)
def test_a_branch_at_the_head_of_a_model(layouts: tuple[tuple[int, ...], ...], said: str) -> None:
    """Nothing before it could bring its input to where the branch ends."""
    item = Matmul("a.b", 8, 8, 8, 64, 64, 256)
    plan = replace(of_mlp()[0], strategy={"a.b": (1, 2, 4)}, layouts={"a.b": layouts})
    with pytest.raises(Unrunnable, match=said):
        written(plan, Chain((Residual((item,), 64),), 4))


def test_samples_that_do_not_divide_by_all_that_once_split_them() -> None:
    """4 samples in 4 parts everywhere; but some are split by digits 0 and 1, then by 0 and 2: in axes of 8."""
    found = count(build_mlp(MLPConfig(widths=[4, 4, 2, 4, 2, 4])), 4, "float32")
    chain, grid = chain_from_profile(found), Grid(1, 8)
    numbers = [(4, 2, 1), (4, 1, 2), (4, 1, 2), (2, 2, 2), (2, 4, 1)]
    given = {item.name: grid.strategy(some) for item, some in zip(chain.matmuls, numbers, strict=True)}
    reported, mesh = written(with_strategies(found, flat(8), given, "free"), chain)
    assert undivided(reported, mesh) == [f"4 samples of linear_{n} are not divisible by 8" for n in (3, 4)]
