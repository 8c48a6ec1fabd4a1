"""Every collective on 2, 4, 6 and 8 ranks against plain slicing, its gradient against autograd."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from torch import Tensor

from engines.sbp.block_collectives import BlockCollectives
from engines.sbp.block_layout import Layout, Mesh
from engines.sbp.instruction import Exchange
from harness.sbp.collective_costs import Collectives
from harness.sbp.device_grid import Grid
from harness.simulator.routes import STEPS
from tests.support.sbp_blocks import block, exchanged, on, walk

pytestmark = pytest.mark.usefixtures("ranks")

SHAPES = ((2, 2), (2, 3, 2), (2, 2, 3, 1))
"""Rows, features (the last dimension; of images the second) and others; times the size of the mesh."""
MESHES = [Mesh(Grid(1, 2)), Mesh(Grid(1, 4)), Mesh(Grid(1, 6)), Mesh(Grid(2, 4))]
Reported = list[tuple[Tensor, Tensor, dict[str, int]]]
"""Of each exchange the block after it, the gradient before it, and the bytes that were sent."""


def shape(number: int, mesh: Mesh) -> list[int]:
    found = list(SHAPES[number % len(SHAPES)])
    column = 1 if len(found) in (2, 4) else len(found) - 1
    return [size * (mesh.devices if n in (0, column) else 1) for n, size in enumerate(found)]


def drawn(number: int, exchange: Exchange, mesh: Mesh, rank: int) -> tuple[Tensor, Tensor]:
    """A block different that of any other rank, and what the block after the exchange is multiplied with."""
    whole = torch.empty(shape(number, mesh), dtype=torch.float64)
    found = []
    for layout, seed in ((exchange.before, 2 * number), (exchange.after, 2 * number + 1)):
        like = block(whole, layout, mesh, rank)
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        found.append(torch.randn(like.shape, dtype=torch.float64, generator=generator))
    return found[0], found[1]


def run(mesh: Mesh, exchanges: list[Exchange], by: BlockCollectives) -> Reported:
    found = []
    for number, exchange in enumerate(exchanges):
        x, weight = drawn(number, exchange, mesh, by.groups.rank)
        x.requires_grad_()
        y = by(x, exchange)
        (y * weight).sum().backward()
        assert x.grad is not None
        found.append((y.detach(), x.grad, dict(by.counter.take()[1])))
    return found


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: str(mesh.devices))
def test_collectives_and_their_gradients(mesh: Mesh) -> None:
    exchanges = walk(mesh, 24, random.Random(mesh.devices))
    reported = on(mesh, partial(run, mesh, exchanges))
    assert {exchange.name for exchange in exchanges} == {"all_gather", "reduce_scatter", "all_to_all"}
    for number, exchange in enumerate(exchanges):
        pairs = [drawn(number, exchange, mesh, rank) for rank in range(mesh.devices)]
        blocks = [x.requires_grad_() for x, _ in pairs]
        after = exchanged(blocks, shape(number, mesh), exchange, mesh)
        sum((y * weight).sum() for y, (_, weight) in zip(after, pairs, strict=True)).backward()  # type: ignore[union-attr]
        for rank, (y, gradient, _) in enumerate(one[number] for one in reported):
            where = f"{exchange}, rank {rank}"
            torch.testing.assert_close(y, after[rank].detach(), msg=lambda text, where=where: f"{where}: {text}")
            torch.testing.assert_close(gradient, blocks[rank].grad, msg=lambda text, where=where: f"{where}: {text}")


def test_bytes_are_those_of_the_costs() -> None:
    """Forward and backward under their names; (k - 1) / k of the buffer of k members."""
    mesh = MESHES[1]
    exchanges = walk(mesh, 12, random.Random(1))
    reported = on(mesh, partial(run, mesh, exchanges))
    for number, exchange in enumerate(exchanges):
        x, y = drawn(number, exchange, mesh, 0)
        members, buffer = mesh.size(exchange.digits), max(x.nbytes, y.nbytes)
        sent = round(STEPS[exchange.name] * Collectives.sent(buffer, members))
        names = f"{exchange.name}@forward", f"{exchange.reversed.name}@backward"
        for one in reported:
            assert one[number][2] == dict.fromkeys(names, sent)


def test_there_and_back_is_what_it_was() -> None:
    mesh = MESHES[3]
    exchanges = [one for one in walk(mesh, 40, random.Random(3)) if one.name == "all_to_all"]

    def returns(by: BlockCollectives) -> list[bool]:
        found = []
        for number, exchange in enumerate(exchanges):
            x, _ = drawn(number, exchange, mesh, by.groups.rank)
            found.append(torch.equal(by(by(x, exchange), exchange.reversed), x))
        return found

    assert len(exchanges) > 5
    assert all(all(one) for one in on(mesh, returns))


def test_sums_and_maxima_of_statistics() -> None:
    """`sum` is differentiated on every member, `total` is everybody's already; `largest` has no gradient."""
    mesh, digits = MESHES[1], (1,)

    def run(by: BlockCollectives) -> list[Tensor]:
        rank = by.groups.rank
        x = torch.tensor([float(rank), 1.0], requires_grad=True)
        y = torch.tensor([float(rank), 1.0], requires_grad=True)
        summed, totalled = by.sum(x, digits), by.total(y, digits)
        ((rank + 1) * summed.sum() + 10 * totalled.sum()).backward()
        assert x.grad is not None and y.grad is not None
        largest = by.largest(x, digits)
        assert not largest.requires_grad
        return [summed.detach(), totalled.detach(), largest, x.grad, y.grad]

    for rank, (summed, totalled, largest, ofsum, oftotal) in enumerate(on(mesh, run)):
        pair = mesh.group(rank, digits)
        assert summed.tolist() == totalled.tolist() == [float(sum(pair)), 2.0]
        assert largest.tolist() == [float(max(pair)), 1.0]
        assert ofsum.tolist() == [float(sum(one + 1 for one in pair))] * 2
        assert oftotal.tolist() == [10.0, 10.0]


def test_nothing_is_sent_where_nothing_is_split() -> None:
    def run(by: BlockCollectives) -> bool:
        x = torch.ones(2)
        same = by(x, None) is x and by.sum(x, ()) is x and by.total(x, ()) is x and torch.equal(by.largest(x, ()), x)
        return same and not by.counter.take()[1]

    assert all(on(MESHES[0], run))


def test_images_split_channels_and_texts_the_last_dimension() -> None:
    mesh = Mesh(Grid(1, 2))
    for dims, column in ((2, 1), (3, 2), (4, 1)):
        whole = torch.arange(4**dims).view([4] * dims)
        mine = block(whole, Layout().split(columns=(0,)), mesh, 1)
        assert mine.shape[column] == 2 and torch.equal(mine, whole.narrow(column, 2, 2))
