"""Shapes and permutations of exchanges; that they bring the right elements is in test_exchange.py."""

from __future__ import annotations

from math import prod

import pytest

from engines.sbp.block_collectives import BlockPermutation, block_permutation, column
from engines.sbp.block_layout import Layout, Mesh
from engines.sbp.instruction import Exchange
from harness.sbp.device_grid import Grid

MESH = Mesh(Grid(1, 6))  # digits of 2 and 3
WHOLE, COLUMNS = Layout(), Layout().split(columns=(0, 1))


def test_columns_are_gathered_after_the_rows() -> None:
    """Parts of (4, 5) arrive one after the other; each row is put together from 2 x 3 of them."""
    found = block_permutation((4, 5), Exchange("all_gather", (0, 1), COLUMNS, COLUMNS.merged((0, 1))), MESH)
    assert found == BlockPermutation((4, 5), (0, 1), (2, 3, 4, 5), (2, 0, 1, 3), (4, 30))


def test_rows_are_gathered_as_they_come() -> None:
    rows = Layout().split(rows=(1,))
    found = block_permutation((4, 7, 5), Exchange("all_gather", (1,), rows, rows.merged((1,))), MESH)
    assert found == BlockPermutation((4, 7, 5), (0, 1, 2), (3, 4, 7, 5), (0, 1, 2, 3), (12, 7, 5))


def test_a_sum_is_cut_into_parts() -> None:
    found = block_permutation((4, 30), Exchange("reduce_scatter", (0, 1), WHOLE, COLUMNS), MESH)
    assert found == BlockPermutation((4, 2, 3, 5), (1, 2, 0, 3), (4, 5), (0, 1), (4, 5))


def test_channels_change_places_with_samples() -> None:
    before, after = Layout().split(columns=(0,)), Layout().split(rows=(0,))
    found = block_permutation((8, 3, 2, 2), Exchange("all_to_all", (0,), before, after), MESH)
    assert found == BlockPermutation((2, 4, 3, 2, 2), (0, 1, 2, 3, 4), (2, 4, 3, 2, 2), (1, 0, 2, 3, 4), (4, 6, 2, 2))


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_to_all"])
def test_nothing_is_lost(name: str) -> None:
    ends = {
        "all_gather": (COLUMNS, COLUMNS.merged((1,))),
        "reduce_scatter": (COLUMNS.merged((1,)), COLUMNS.merged((1,)).split(rows=(1,))),
        "all_to_all": (COLUMNS, Layout(WHOLE.rows.with_split((1,)), COLUMNS.columns.without((1,)))),
    }
    found = block_permutation((6, 12), Exchange(name, (1,), *ends[name]), MESH)
    times = {"all_gather": 3, "reduce_scatter": 1 / 3, "all_to_all": 1}[name]
    assert prod(found.opened) == 72
    assert prod(found.received) == prod(found.closed) == 72 * times


def test_features_are_channels_of_images() -> None:
    assert [column(dims) for dims in (2, 3, 4)] == [1, 2, 1]
