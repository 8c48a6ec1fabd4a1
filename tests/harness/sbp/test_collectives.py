"""Table 2's formulas, and what shares a node's port; factors of grids."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cluster import Cluster, Link
from harness.sbp.collectives import Collectives, grid_of
from harness.sbp.grid import Grid

CLUSTER = Cluster(nodes=4, devices_per_node=6, intra=Link(1e-6, 1e-11), node_port=Link(1e-5, 1e-10))
GRID = Grid(4, 6)


@pytest.mark.parametrize(
    ("name", "rounds"), [("all_reduce", 2), ("reduce_scatter", 1), ("all_gather", 1), ("all_to_all", 1)]
)
@pytest.mark.parametrize(
    ("nodes", "local", "alpha_s", "beta"),
    [
        (1, 3, 1e-6, 1e-11),  # inside of nodes
        (4, 1, 1e-5, 6e-10),  # six rings leave each node at once
        (2, 3, 1e-5, 2e-10),  # two of them
        (4, 6, 1e-5, 1e-10),  # one, of all devices
    ],
)
def test_a_ring_costs_what_table_2_says(name, rounds, nodes, local, alpha_s, beta):
    members, size = nodes * local, 1e6
    want = rounds * ((members - 1) * alpha_s + (members - 1) / members * size * beta)
    got = Collectives(CLUSTER, GRID).seconds(name, GRID.degree(nodes, local), size)
    assert got == pytest.approx(want, rel=1e-12)


def test_one_member_costs_nothing():
    assert Collectives(CLUSTER, GRID).seconds("all_reduce", GRID.none, 1e6) == 0.0


@given(st.integers(1, 60), st.integers(1, 12))
def test_strategies_are_all_factorizations_each_once(nodes, local):
    grid = Grid(nodes, local)
    found = {grid.numbers(strategy) for strategy in grid.strategies}
    assert len(found) == len(grid.strategies)
    one = [(a, b, nodes // a // b) for a in range(1, nodes + 1) for b in range(1, nodes + 1) if nodes % (a * b) == 0]
    other = [(a, b, local // a // b) for a in range(1, local + 1) for b in range(1, local + 1) if local % (a * b) == 0]
    assert len(found) == len(one) * len(other)
    assert all(grid.numbers(grid.strategy(numbers)) == numbers for numbers in found)


def test_numbers_of_several_nodes_of_several_devices_are_pairs():
    strategy = GRID.strategy((2, 1, 2, 3, 1, 2))
    assert [GRID.parts(degree) for degree in strategy] == [(2, 1), (2, 3), (1, 2)]
    with pytest.raises(ValueError, match="is no strategy for 4 nodes of 6 devices"):
        GRID.strategy((2, 2, 6))
    with pytest.raises(ValueError, match="3 x 1 does not divide 4 nodes of 6 devices"):
        GRID.degree(3, 1)


def test_devices_fill_whole_nodes():
    assert (grid_of(CLUSTER, 12), grid_of(CLUSTER, 3)) == (Grid(2, 6), Grid(1, 3))
    with pytest.raises(ValueError, match="8 devices fill no whole number of nodes of 6"):
        grid_of(CLUSTER, 8)
