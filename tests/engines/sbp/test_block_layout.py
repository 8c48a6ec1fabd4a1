"""Blocks of tensors on a mesh: those of all ranks together are the tensor, each part once where nothing is the same."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.sbp.block_layout import Dim, Layout, Mesh
from harness.sbp.device_grid import Grid
from tests.support.sbp_meshes import MESHES, meshes


@st.composite
def dims(draw: st.DrawFn, of: str = "some") -> tuple[Mesh, Dim]:
    """A mesh, and a dimension with some of its digits for axes in any order, of which some are split."""
    mesh = draw(meshes)
    order = draw(st.permutations(mesh.all))
    axes = tuple(order[: draw(st.integers(0, len(order)))])
    return mesh, Dim(axes, frozenset(axis for axis in axes if draw(st.booleans())))


@given(dims(), st.integers(1, 4))
def test_blocks_partition_a_dimension(given_: tuple[Mesh, Dim], rest: int) -> None:
    """Ranks that differ in a split digit share nothing; those that differ in others only have the same."""
    mesh, dim = given_
    size = rest * mesh.size(dim.axes)
    blocks: dict[tuple[int, ...], np.ndarray] = {}
    for rank in range(mesh.devices):
        own = tuple(mesh.place(rank)[digit] for digit in sorted(dim.split))
        block = dim.mine(size, mesh, rank)
        assert (blocks.setdefault(own, block) == block).all()
    assert sorted(np.concatenate(list(blocks.values()))) == list(range(size))
    assert {len(block) for block in blocks.values()} == {size // mesh.size(dim.split)}


@given(dims(), st.integers(1, 3))
def test_like_means_the_same_blocks(given_: tuple[Mesh, Dim], rest: int) -> None:
    """Of the same axes in another order, with the same ones split."""
    mesh, dim = given_
    size = rest * mesh.devices
    for n in range(len(dim.axes)):
        other = Dim(dim.axes[n:] + dim.axes[:n], dim.split)
        if dim.like(other):
            for rank in range(mesh.devices):
                assert (dim.mine(size, mesh, rank) == other.mine(size, mesh, rank)).all()


@given(dims(), st.data())
def test_what_is_merged_comes_back_to_the_same_blocks(given_: tuple[Mesh, Dim], data: st.DataObject) -> None:
    """An axis stays where it was: so a residual branch finds back, whichever digits it merged."""
    mesh, dim = given_
    merged = tuple(digit for digit in sorted(dim.split) if data.draw(st.booleans()))
    without = dim.without(merged)
    assert without.split == dim.split - set(merged)
    assert without.with_split(merged) == dim
    size = mesh.size(dim.axes)
    for rank in range(mesh.devices):
        together = [dim.mine(size, mesh, one) for one in mesh.group(rank, merged)]
        assert sorted(np.concatenate(together)) == sorted(without.mine(size, mesh, rank))


def test_a_new_split_is_inside_of_the_old_ones() -> None:
    mesh = Mesh(Grid(1, 4))
    dim = Dim().with_split((1,)).with_split((0,))
    assert dim == Dim((1, 0), frozenset((0, 1)))
    # rank 1 has number 0 of digit 0 and 1 of digit 1: the second half, and of that the first
    assert [list(dim.mine(8, mesh, rank)) for rank in range(4)] == [[0, 1], [4, 5], [2, 3], [6, 7]]
    assert list(dim.without((1,)).mine(8, mesh, 1)) == [0, 1, 4, 5]


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"{mesh.grid.nodes}x{mesh.grid.local}")
def test_a_mesh_counts_like_its_grid(mesh: Mesh) -> None:
    assert prod(mesh.sizes) == mesh.devices == mesh.grid.nodes * mesh.grid.local
    assert len({mesh.place(rank) for rank in range(mesh.devices)}) == mesh.devices
    assert mesh.count(mesh.all) == mesh.grid.all
    for kind, digits in zip(mesh.grid.kinds, mesh.kinds, strict=True):
        assert [mesh.sizes[digit] for digit in digits] == [kind.prime] * kind.count
        across = {rank // mesh.grid.local for rank in mesh.group(0, digits)}
        assert len(across) == (mesh.size(digits) if kind.across else 1), "nodes have ranks that follow each other"


@given(meshes, st.data())
def test_groups_share_all_other_digits(mesh: Mesh, data: st.DataObject) -> None:
    digits = tuple(data.draw(st.permutations(mesh.all))[: data.draw(st.integers(0, len(mesh.all)))])
    groups = {tuple(mesh.group(rank, digits)) for rank in range(mesh.devices)}
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.devices))
    for group in groups:
        assert len(group) == mesh.size(digits)
        places = [mesh.place(rank) for rank in group]
        assert len({tuple(n for d, n in enumerate(place) if d not in digits) for place in places}) == 1
        assert [tuple(place[d] for d in digits) for place in places] == sorted(
            tuple(place[d] for d in digits) for place in places
        ), "in the order of the digits"


def test_what_does_not_divide_is_an_error() -> None:
    with pytest.raises(ValueError, match="10 cannot be split into 2 x 2"):
        Dim((0, 1), frozenset((0,))).mine(10, Mesh(Grid(1, 4)), 0)


def test_layouts_split_and_merge_both_dimensions() -> None:
    layout = Layout().split(rows=(0,), columns=(2, 1))
    assert layout.merged((0, 2)) == Layout(Dim((0,)), Dim((2, 1), frozenset((1,))))
    assert layout.merged((0, 2)).split(rows=(0,), columns=(2,)) == layout
    assert layout.like(Layout(layout.rows, Dim((2, 1, 0), frozenset((1, 2)))))
    assert not layout.like(Layout(layout.rows, Dim((1, 2), frozenset((1, 2)))))
