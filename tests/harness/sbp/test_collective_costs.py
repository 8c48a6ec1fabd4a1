"""Table 2's formulas, and what shares a node's port; factors of grids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core.cluster import Cluster, Link
from harness.sbp.collective_costs import Collectives, grid_from_cluster
from harness.sbp.device_grid import Degree, Grid, below
from tests.harness.sbp.nets import clusters

CLUSTER = Cluster(nodes=4, devices_per_node=6, intra=Link(1e-6, 1e-11), node_port=Link(1e-5, 1e-10))
GRID = Grid(4, 6)


RINGS = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
LINKS = [
    (1, 3, 1e-6, 1e-11),  # inside of nodes
    (4, 1, 1e-5, 6e-10),  # six rings leave each node at once
    (2, 3, 1e-5, 2e-10),  # two of them
    (4, 6, 1e-5, 1e-10),  # one, of all devices
]


@pytest.mark.parametrize(("name", "rounds"), RINGS.items())
@pytest.mark.parametrize(("nodes", "local", "alpha_s", "beta"), LINKS)
def test_a_ring_costs_what_table_2_says(name, rounds, nodes, local, alpha_s, beta):
    members, size = nodes * local, 1e6
    want = rounds * ((members - 1) * alpha_s + (members - 1) / members * size * beta)
    got = Collectives(CLUSTER, GRID).seconds(name, GRID.degree(nodes, local), size)
    assert got == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("name", RINGS)
def test_one_ring_alone_may_have_more_of_a_port_than_several(name):
    for (nodes, local, _, _), faster in zip(LINKS, (1.0, 1.0, 1.0, 2.0), strict=True):
        degree = GRID.degree(nodes, local)
        free = replace(CLUSTER, intra=Link(0.0, 1e-11), node_port=Link(0.0, 1e-10))
        shared = Collectives(free, GRID).seconds(name, degree, 1e6)
        alone = Collectives(replace(free, alone_bandwidth=2e10), GRID).seconds(name, degree, 1e6)
        assert shared / alone == pytest.approx(faster)


@pytest.mark.parametrize("name", [*RINGS, "all_to_all"])
def test_each_call_among_several_devices_costs_something_of_its_own(name):
    cluster = replace(CLUSTER, collective_call_s=1e-3)
    for nodes, local in ((1, 3), (4, 1), (4, 6)):
        degree = GRID.degree(nodes, local)
        plain, called = (Collectives(one, GRID).seconds(name, degree, 1e6) for one in (CLUSTER, cluster))
        assert called == pytest.approx(plain + 1e-3, rel=1e-12)
    assert Collectives(cluster, GRID).seconds(name, GRID.none, 1e6) == 0


@pytest.mark.parametrize(("nodes", "local", "alpha_s", "beta"), LINKS[:2])
def test_an_all_to_all_over_links_of_one_kind_costs_what_table_2_says(nodes, local, alpha_s, beta):
    members, size = nodes * local, 1e6
    want = (members - 1) * alpha_s + (members - 1) / members * size * beta
    got = Collectives(CLUSTER, GRID).seconds("all_to_all", GRID.degree(nodes, local), size)
    assert got == pytest.approx(want, rel=1e-12)


def groups(nodes: int, local: int) -> Iterator[list[tuple[int, int]]]:
    """All groups of so many nodes, and so many devices (node, number) of each, into which the grid falls."""
    for node, number in product(range(0, GRID.nodes, nodes), range(0, GRID.local, local)):
        yield [(node + i, number + k) for i in range(nodes) for k in range(local)]


@pytest.mark.parametrize("name", [*RINGS, "all_to_all"])
@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize("local", [1, 2, 3, 6])
def test_a_nodes_port_takes_what_all_groups_send_out_of_it(name, nodes, local):
    """Message by message: in an all-to-all each member has a share for each other, in a ring one for its neighbour."""
    size, out = 1e6, Counter[int]()
    for group in groups(nodes, local):
        ring = list(zip(group, [*group[1:], group[0]], strict=True))
        pairs = list(permutations(group, 2)) if name == "all_to_all" else ring * (len(group) - 1) * RINGS[name]
        out.update(Counter({node: 0 for node, _ in group}))
        for (source, _), (target, _) in pairs:
            out[source] += (source != target) * size / len(group)
    assert len(set(map(round, out.values()))) == 1
    cluster = Cluster(nodes=4, devices_per_node=6, intra=Link(), node_port=Link(0.0, 1e-10))
    got = Collectives(cluster, GRID).seconds(name, GRID.degree(nodes, local), size)
    assert got == pytest.approx(out[0] * 1e-10, rel=1e-9)


@settings(deadline=None)
@given(clusters(), st.floats(0, 1e9))
def test_an_all_to_all_among_less_devices_is_never_dearer(cluster, size):
    grid = Grid(cluster.nodes, cluster.devices_per_node)
    priced = Collectives(cluster, grid)

    def seconds(degree: Degree) -> float:
        return priced.seconds("all_to_all", degree, size)

    for degree in grid.degrees:
        assert all(seconds(part) <= seconds(degree) * (1 + 1e-12) for part in below(degree))


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
    with pytest.raises(ValueError, match="is not a strategy for 4 nodes of 6 devices"):
        GRID.strategy((2, 2, 6))
    with pytest.raises(ValueError, match="3 x 1 does not divide 4 nodes of 6 devices"):
        GRID.degree(3, 1)


def test_devices_fill_whole_nodes():
    assert (grid_from_cluster(CLUSTER, 12), grid_from_cluster(CLUSTER, 3)) == (Grid(2, 6), Grid(1, 3))
    with pytest.raises(ValueError, match="8 devices fill no whole number of nodes of 6"):
        grid_from_cluster(CLUSTER, 8)
