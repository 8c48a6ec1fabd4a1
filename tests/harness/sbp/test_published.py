"""What the AutoDDL paper prints: figure 3's volumes, figure 7's strategies, the slopes of section 4.4.2."""

from __future__ import annotations

from math import log

import pytest

from harness.cluster import Cluster, Link
from harness.sbp.chain import Attention, Chain, Matmul
from harness.sbp.collectives import Collectives
from harness.sbp.costs import Costs, Rules
from harness.sbp.grid import Grid
from harness.sbp.optimum import Search
from harness.sbp.traffic import sent


def costs(nodes: int, paths: str = "mixed", alpha_s: float = 0.0, **rules) -> Costs:
    cluster = Cluster(nodes=nodes, node_port=Link(alpha_s, 1e-10))
    return Costs(Collectives(cluster, Grid(nodes, 1)), 4, 1, Rules(paths, "any", **rules))


def dense(name: str, samples: int, inputs: int, outputs: int, whole: bool = False) -> Matmul:
    return Matmul(
        name, samples, inputs, outputs, samples * inputs, samples * outputs, 4 * inputs * outputs, whole=whole
    )


HIDDEN, BATCH, TOKENS = 8192, 1024, 1024
ELEMENTS = BATCH * TOKENS * HIDDEN
LAYER = (
    Matmul("before", BATCH, HIDDEN, HIDDEN, ELEMENTS, ELEMENTS, 0),
    Matmul("qkv", BATCH, HIDDEN, 3 * HIDDEN, ELEMENTS, 3 * ELEMENTS, 0),
    Attention(BATCH, 64, 3 * ELEMENTS),
    Matmul("projection", BATCH, HIDDEN, HIDDEN, ELEMENTS, ELEMENTS, 0),
)


@pytest.mark.parametrize(
    ("qkv", "projection", "billions"),
    [((4, 16, 1), (4, 1, 16), 3.75), ((4, 8, 2), (4, 4, 4), 2.0)],
    ids=["Megatron", "AutoDDL"],
)
@pytest.mark.parametrize("paths", ["mixed", "paper"])
def test_figure_3_volumes(qkv, projection, billions, paths):
    found = costs(64, paths)
    given = {"before": (4, 16, 1), "qkv": qkv, "projection": projection}
    given = {name: found.grid.strategy(numbers) for name, numbers in given.items()}
    told = sent(Search(Chain(LAYER, 4), found, "free", given).route(), found)
    assert sum(size for kind, size in told.items() if kind.endswith("forward")) / 4 == billions * 2**30
    assert not any("all_to_all" in kind for kind in told)


@pytest.mark.parametrize("paths", ["mixed", "paper"])
def test_figure_3_is_the_least_volume_with_weights_on_4_nodes_each(paths):
    found = costs(64, paths)
    four = [strategy for strategy in found.grid.strategies if found.grid.size(strategy.p0) == 4]
    best: dict[tuple, float] = {}
    for qkv in four:
        for projection in four:
            given = {"before": found.grid.strategy((4, 16, 1)), "qkv": qkv, "projection": projection}
            told = sent(Search(Chain(LAYER, 4), found, "free", given).route(), found)
            best[found.grid.numbers(qkv), found.grid.numbers(projection)] = sum(told.values())
    least = min(best.values())
    assert [pair for pair, size in best.items() if size == least] == [((4, 8, 2), (4, 4, 4))]


@pytest.mark.parametrize("paths", ["mixed", "paper"])
def test_figure_7_replicates_no_dense_weight_of_vgg13(paths):
    samples = 256
    convolutions = Matmul("conv", samples, 512, 512, 100352 * samples, 25088 * samples, 9437184, whole=True)
    layers = [dense("0", samples, 25088, 4096), dense("1", samples, 4096, 4096), dense("2", samples, 4096, 1000)]
    found = costs(32, paths)
    route = Search(Chain((convolutions, *layers), 4), found, "free").route()
    assert [found.grid.numbers(strategy) for strategy in route.strategies.values()] == [
        (32, 1, 1), (1, 2, 16), (1, 4, 8), (1, 2, 16),
    ]  # fmt: skip


def _slope(sizes: dict[int, float]) -> float:
    (p, one), (q, other) = min(sizes.items()), max(sizes.items())
    return log(other / one) / log(q / p)


def test_volume_falls_by_two_thirds_of_the_devices_power_and_megatrons_by_half():
    """n x n products of n rows, in the middle of a chain (section 4.4.2, claim AD-5)."""
    width = 2**24
    layers = Chain(tuple(dense(str(number), width, width, width) for number in range(5)), 4)
    cubes, squares = {}, {}
    for p in (2**18, 2**24):
        found, side, root = costs(p), round(p ** (1 / 3)), round(p**0.5)
        for sizes, cycle in ((cubes, [(side,) * 3]), (squares, [(root, root, 1), (root, 1, root)])):
            given = {str(number): found.grid.strategy(cycle[number % len(cycle)]) for number in range(5)}
            sizes[p] = sum(sent(Search(layers, found, "free", given).route(), found).values())
    assert _slope(cubes) == pytest.approx(-2 / 3, abs=0.005)
    assert _slope(squares) >= -0.5
