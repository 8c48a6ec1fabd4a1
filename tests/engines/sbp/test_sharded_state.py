"""Which block of a parameter a rank has, and whole tensors from all blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.sbp.block_layout import Dim, Mesh
from engines.sbp.sharded_state import Cut, Shard
from harness.sbp.device_grid import Grid
from tests.support.sbp_meshes import meshes


@st.composite
def shards(draw: st.DrawFn) -> tuple[Mesh, Shard]:
    """Of a matrix, or more: each digit splits one dimension at most; of some the rows are queries, keys, values."""
    mesh = draw(meshes)
    dims = draw(st.integers(1, 3))
    places = [draw(st.integers(-1, dims - 1)) for _ in mesh.all]
    cuts = {}
    for n in range(dims):
        axes = tuple(draw(st.permutations([digit for digit in mesh.all if places[digit] == n])))
        if axes:
            cuts[n] = Cut(Dim(axes, frozenset(axes)))
    shape = [draw(st.integers(1, 3)) * mesh.devices for _ in range(dims)]
    if draw(st.booleans()):
        heads = mesh.devices
        shape[0] = 3 * heads * draw(st.integers(1, 2))
        cuts[0] = Cut(cuts[0].dim if 0 in cuts else Dim(), heads)
    return mesh, Shard(tuple(shape), cuts)


@given(shards())
def test_from_whole_to_shards_and_back(given_: tuple[Mesh, Shard]) -> None:
    mesh, shard = given_
    whole = torch.arange(torch.Size(shard.shape).numel()).view(shard.shape)
    blocks = [shard.of(whole, mesh, rank) for rank in range(mesh.devices)]
    split = [digit for cut in shard.cuts.values() for digit in cut.dim.split]
    assert {block.numel() for block in blocks} == {whole.numel() // mesh.size(frozenset(split))}
    assert torch.equal(shard.whole(blocks, mesh), whole)


@given(shards())
def test_blocks_of_all_ranks_are_the_whole(given_: tuple[Mesh, Shard]) -> None:
    """Those of two ranks are the same or do not overlap; each is a view of what its rank has."""
    mesh, shard = given_
    whole = torch.arange(torch.Size(shard.shape).numel()).view(shard.shape)
    found = torch.full(shard.shape, -1)
    for rank in range(mesh.devices):
        own = shard.of(whole, mesh, rank)
        blocks = shard.blocks(own, mesh, rank)
        assert blocks.size() == whole.shape
        assert sum(one.numel() for one in blocks.blocks.values()) == own.numel()
        for offset, one in blocks.blocks.items():
            place = tuple(slice(first, first + size) for first, size in zip(offset, one.shape, strict=True))
            assert one.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
            assert (found[place] == -1).all() or torch.equal(found[place], one)
            found[place] = one
    assert torch.equal(found, whole)


def test_heads_stay_together() -> None:
    """(query, key, value) x 2 heads x width 2: a device has the query, the key and the value of one head."""
    mesh, shard = Mesh(Grid(1, 2)), Shard((12,), {0: Cut(Dim((0,), frozenset((0,))), heads=2)})
    whole = torch.arange(12)
    assert shard.of(whole, mesh, 0).tolist() == [0, 1, 4, 5, 8, 9]
    assert shard.of(whole, mesh, 1).tolist() == [2, 3, 6, 7, 10, 11]


@pytest.mark.parametrize("cuts", [{}, {0: Cut(Dim((0,), frozenset((0,))))}])
def test_a_shard_is_a_copy(cuts: dict[int, Cut]) -> None:
    """Training it leaves the whole tensor as it was."""
    whole = torch.nn.Parameter(torch.zeros(4))
    mine = Shard((4,), cuts).of(whole, Mesh(Grid(1, 2)), 1)
    assert not mine.requires_grad
    mine += 1
    assert whole.tolist() == [0.0] * 4


def test_a_number_is_whole_everywhere() -> None:
    counted = torch.tensor(7)
    mesh = Mesh(Grid(1, 2))
    assert Shard(()).whole([Shard(()).of(counted, mesh, rank) for rank in (0, 1)], mesh).item() == 7
