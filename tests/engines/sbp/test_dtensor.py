"""torch's DTensor as an oracle: the same blocks after the same redistributions, the same product."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from engines.sbp.block_collectives import BlockCollectives
from engines.sbp.block_layout import Layout, Mesh
from engines.sbp.instruction import Exchange
from engines.sbp.program import program
from engines.sbp.sharded_layers import Entry, Product
from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan
from harness.measure.count_model import count
from harness.sbp.device_grid import Grid
from harness.sbp.matmul_chain import chain_from_profile
from tests.engines import networks
from tests.engines.networks import Network
from tests.support.sbp_blocks import block, on
from tests.support.sbp_plans import flat, with_strategies

pytestmark = pytest.mark.usefixtures("ranks")

MESH = Mesh(Grid(1, 4))
WHOLE = (8, 12)
S0, S1, R, P = Shard(0), Shard(1), Replicate(), Partial()
MOVES: list[tuple[Sequence[Placement], Sequence[Placement]]] = [
    ((S0, S0), (S0, R)), ((S1, S1), (S1, R)), ((S0, S1), (R, S1)), ((S0, S1), (S0, R)), ((S1, S0), (R, S0)),
    ((S0, S0), (R, R)), ((S0, S1), (R, R)), ((S0, P), (S0, S0)), ((S0, P), (S0, S1)), ((S1, P), (S1, S0)),
    ((S1, P), (S1, S1)), ((P, S0), (S1, S0)), ((P, P), (S0, S0)), ((P, P), (S0, S1)), ((R, P), (R, S0)),
    ((S0, S0), (S0, S1)), ((S1, S1), (S1, S0)), ((R, S0), (R, S1)), ((R, S1), (R, S0)), ((S0, S1), (S0, S0)),
]  # fmt: skip
"""On a mesh of 2 x 2, from and to. What DTensor shards by both dimensions of the mesh it shards by the first one first:
so blocks are the same where the later digit is split inside of the earlier one, and undone before it."""


def layout(placements: Sequence[Placement]) -> Layout:
    return Layout().split(
        rows=tuple(digit for digit, place in enumerate(placements) if place == S0),
        columns=tuple(digit for digit, place in enumerate(placements) if place == S1),
    )


def exchange_of(before: Sequence[Placement], after: Sequence[Placement]) -> Exchange:
    """Exchanges keep the axes of what they merge, in place."""
    digits = tuple(n for n, (one, other) in enumerate(zip(before, after, strict=True)) if one != other)
    kinds = {(one == P, other == R) for n, (one, other) in enumerate(zip(before, after, strict=True)) if n in digits}
    name = {(True, False): "reduce_scatter", (False, True): "all_gather", (False, False): "all_to_all"}[kinds.pop()]
    start, there = layout(before), layout(after)
    end = Layout(start.rows.without(digits), start.columns.without(digits))
    end = Layout(end.rows.with_split(tuple(d for d in digits if after[d] == S0)),
                 end.columns.with_split(tuple(d for d in digits if after[d] == S1)))  # fmt: skip
    assert not kinds and end.like(there)
    return Exchange(name, digits, start, end)


def test_redistributions_give_the_same_blocks() -> None:
    whole = torch.arange(96.0, dtype=torch.float64).view(WHOLE)

    def run(by: BlockCollectives) -> list[tuple[Tensor, Tensor]]:
        mesh, found = init_device_mesh("cpu", (2, 2)), []
        for before, after in MOVES:
            # of partial sums each device has another share: so much of the whole that they add up to it
            shares = [(1 + MESH.place(by.groups.rank)[n]) / 3 if place == P else 1.0 for n, place in enumerate(before)]
            mine = block(whole, layout(before), MESH, by.groups.rank) * shares[0] * shares[1]
            theirs = DTensor.from_local(mine, mesh, before).redistribute(mesh, after).to_local()
            found.append((by(mine, exchange_of(before, after)), theirs))
        return found

    for reported in on(MESH, run):
        for (mine, theirs), (before, after) in zip(reported, MOVES, strict=True):
            torch.testing.assert_close(mine, theirs, msg=lambda text, w=(before, after): f"{w}: {text}")


def plan_of(numbers: tuple[int, int, int]) -> tuple[ModelProfile, Plan]:
    """One product of 8 samples, 12 x 8."""
    one = Network("one", lambda: [nn.Linear(12, 8, bias=False)], lambda n: torch.randn(n, 12),
                  lambda n: torch.randn(n, 8), networks._squares)  # fmt: skip
    profile = count(one, 8, "float64")
    return profile, with_strategies(profile, flat(4), {"0": MESH.grid.strategy(numbers)}, "batch_split")


@pytest.mark.parametrize("numbers", [MESH.grid.numbers(strategy) for strategy in MESH.grid.strategies])
def test_a_product_under_every_strategy(numbers: tuple[int, int, int]) -> None:
    """Output, and gradients of input and weight; DTensor finds its own way from the same placements."""
    profile, plan = plan_of(numbers)
    dice = torch.Generator().manual_seed(random.Random(str(numbers)).randrange(1000))
    x, weight, back = (torch.randn(size, generator=dice, dtype=torch.float64) for size in ((8, 12), (8, 12), (8, 8)))

    def run(by: BlockCollectives) -> list[list[Tensor]]:
        reported = program(plan, chain_from_profile(profile), MESH).instructions["0"]
        rank = by.groups.rank
        begins = reported.before.before if reported.before else reported.arrives
        own = block(x, begins, MESH, rank).requires_grad_()
        shard = weight[torch.from_numpy(reported.outputs.mine(8, MESH, rank).copy())]
        shard = shard[:, torch.from_numpy(reported.inputs.mine(12, MESH, rank).copy())]
        product = Product(nn.Linear(12, 8, bias=False), reported, Entry(reported, by), nn.Parameter(shard), None, 0)
        y = product(own)
        (y * block(back, reported.output_layout, MESH, rank)).sum().backward()
        assert own.grad is not None and product.weight.grad is not None
        mine = [y.detach(), own.grad, by.sum(product.weight.grad, reported.replicas)]
        cuts = dict.fromkeys(reported.outputs.split, 1) | dict.fromkeys(reported.inputs.split, 2)
        theirs = by_dtensor(x, weight, back, [cuts.get(digit, 0) for digit in MESH.all])
        like = [block(theirs[0], reported.output_layout, MESH, rank), block(theirs[1], begins, MESH, rank)]
        of_weight = theirs[2][torch.from_numpy(reported.outputs.mine(8, MESH, rank).copy())]
        like.append(of_weight[:, torch.from_numpy(reported.inputs.mine(12, MESH, rank).copy())])
        return [mine, like]

    for mine, like in on(MESH, run):
        for one, other in zip(mine, like, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def by_dtensor(x: Tensor, weight: Tensor, back: Tensor, factors: Sequence[int]) -> list[Tensor]:
    """Whole output and gradients; each dimension of the mesh is in p0, p1 or p2 (0, 1, 2)."""
    mesh = init_device_mesh("cpu", (2, 2))
    of_x, of_weight = [(S0, R, S1)[f] for f in factors], [(R, S0, S1)[f] for f in factors]
    left = distribute_tensor(x, mesh, of_x).requires_grad_()
    right = distribute_tensor(weight, mesh, of_weight).requires_grad_()
    y = torch.mm(left, right.t())
    assert [isinstance(place, Partial) for place in y.placements] == [factor == 2 for factor in factors]
    (y.redistribute(mesh, [R, R]) * distribute_tensor(back, mesh, [R, R])).sum().backward()
    return [y.full_tensor().detach(), left.grad.full_tensor(), right.grad.full_tensor()]
