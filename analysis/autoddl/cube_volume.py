"""Section 4.4.2: what a device sends and holds for an n x n matmul whose strategy is a cube, p0 = p1 = p2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from harness.core.cluster import Cluster
from harness.sbp.collective_costs import Collectives, grid_from_cluster
from harness.sbp.device_grid import Strategy
from harness.sbp.matmul_chain import Chain, Matmul
from harness.sbp.route_to_plan import matmul_figures
from harness.sbp.shortest_path import Search
from harness.sbp.strategy_costs import Costs, Rules

SIDES = (2, 4, 8, 16)
"""p^(1/3) of the claim's numbers of devices."""
WIDTH = 4096
FLOAT_BYTES = 4


def volumes() -> dict[int, float]:
    """Bytes that a device sends in a step, by p."""
    return {side**3: sum(_matmul(side)["bytes"].values()) for side in SIDES}


def memories() -> dict[int, float]:
    """Bytes of the weight's shard and of the gathered input, by p."""
    return {side**3: _matmul(side)["held_bytes"] for side in SIDES}


def without_own_share(sizes: Mapping[int, float]) -> dict[int, float]:
    """Return volumes / ((k - 1) / k), k = p^(1/3): the share of its buffer that a member of a collective sends."""
    return {p: size * k / (k - 1) for p, size in sizes.items() for k in (round(p ** (1 / 3)),)}


def bound_ratio(sizes: Mapping[int, float]) -> float:
    """Return the largest of sizes / (n^2 / p^(2/3)) over p, relative to the smallest."""
    constants = [size * p ** (2 / 3) / WIDTH**2 for p, size in sizes.items()]
    return max(constants) / min(constants)


def slope(sizes: Mapping[int, float]) -> float:
    """Return the slope of the least-squares line through the logarithms."""
    return float(np.polyfit(np.log(list(sizes)), np.log(list(sizes.values())), 1)[0])


def _matmul(side: int) -> dict[str, Any]:
    """Predicted bytes of the second of two matmuls, whose input comes from the first."""
    size = WIDTH**2
    items = [Matmul(name, WIDTH, WIDTH, WIDTH, size, size, FLOAT_BYTES * size) for name in ("first", "second")]
    cluster = Cluster(nodes=side**3)
    costs = Costs(Collectives(cluster, grid_from_cluster(cluster, side**3)), FLOAT_BYTES, 1, Rules())
    cube = Strategy(*[costs.grid.degree(side, 1)] * 3)
    route = Search(Chain(tuple(items), FLOAT_BYTES), costs, fixed={item.name: cube for item in items}).route()
    return matmul_figures(route, costs)["second"]
