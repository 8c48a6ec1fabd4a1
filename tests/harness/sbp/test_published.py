"""What the AutoDDL paper prints: figure 3's volumes, figure 7's strategies, the slopes of section 4.4.2."""

from __future__ import annotations

import numpy as np
import pytest

from harness.core.cluster import Cluster, Link
from harness.sbp.collective_costs import Collectives
from harness.sbp.device_grid import Grid
from harness.sbp.matmul_chain import Attention, Chain, Matmul
from harness.sbp.route_to_plan import matmul_figures
from harness.sbp.shortest_path import Search
from harness.sbp.strategy_costs import Costs, Rules
from tests.harness.sbp.volumes import sent


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
    sent_bytes = sent(Search(Chain(LAYER, 4), found, "free", given).route(), found)
    assert sum(size for kind, size in sent_bytes.items() if kind.endswith("forward")) / 4 == billions * 2**30
    assert not any("all_to_all" in kind for kind in sent_bytes)


@pytest.mark.parametrize("paths", ["mixed", "paper"])
def test_figure_3_is_the_least_volume_with_weights_on_4_nodes_each(paths):
    found = costs(64, paths)
    four = [strategy for strategy in found.grid.strategies if found.grid.size(strategy.p0) == 4]
    best: dict[tuple, float] = {}
    for qkv in four:
        for projection in four:
            given = {"before": found.grid.strategy((4, 16, 1)), "qkv": qkv, "projection": projection}
            sent_bytes = sent(Search(Chain(LAYER, 4), found, "free", given).route(), found)
            best[found.grid.numbers(qkv), found.grid.numbers(projection)] = sum(sent_bytes.values())
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


CUBES = (8, 64, 512, 4096)
"""The claim's numbers of devices."""
WIDTH = 2**24
SQUARES = Chain(tuple(dense(str(number), WIDTH, WIDTH, WIDTH) for number in range(5)), 4)


def per_square(p: int, *cycle: tuple[int, int, int]) -> tuple[float, float]:
    """Bytes that a device sends and holds for two n x n matmuls of n rows in the middle of a chain."""
    found = costs(p)
    given = {str(number): found.grid.strategy(cycle[number % len(cycle)]) for number in range(5)}
    own = matmul_figures(Search(SQUARES, found, "free", given).route(), found)
    return (
        sum(sum(own[name]["bytes"].values()) for name in ("1", "2")), own["1"]["held_bytes"] + own["2"]["held_bytes"]
    )  # fmt: skip


@pytest.mark.parametrize("p", CUBES)
def test_volume_and_memory_of_cubes_at_the_papers_devices(p):
    """Section 4.4.2, claim AD-5. Six collectives over k devices each, an all-reduce is two; weight and input."""
    k = round(p ** (1 / 3))
    buffer = 4 * WIDTH**2 / k**2
    volume, memory = per_square(p, (k, k, k))
    assert volume == 2 * 6 * (k - 1) / k * buffer
    assert memory == 2 * 2 * buffer


def _slope(sizes: dict[int, float]) -> float:
    """Least squares over logarithms."""
    return float(np.polyfit(np.log(list(sizes)), np.log(list(sizes.values())), 1)[0])


def test_memory_falls_by_two_thirds_of_the_devices_power_and_the_volume_only_among_many():
    """The volume's (k - 1) / k, k = p^(1/3), is 1/2 on 8 devices and 15/16 on 4096."""
    cubes = {p: per_square(p, (round(p ** (1 / 3)),) * 3) for p in (*CUBES, 2**18, 2**24)}
    assert _slope({p: cubes[p][1] for p in CUBES}) == pytest.approx(-2 / 3, rel=1e-9)
    assert _slope({p: cubes[p][0] for p in CUBES}) == pytest.approx(-0.5686, abs=5e-5)
    assert _slope({p: cubes[p][0] for p in (2**18, 2**24)}) == pytest.approx(-0.664, abs=5e-4)


@pytest.mark.parametrize("devices", [(64, 4096), (2**18, 2**24)])
def test_megatrons_volume_falls_by_no_more_than_half_of_the_devices_power(devices):
    roots = {p: round(p**0.5) for p in devices}
    assert _slope({p: per_square(p, (r, r, 1), (r, 1, r))[0] for p, r in roots.items()}) >= -0.5
