"""Baselines of AutoDDL: data parallelism, Megatron-LM's two dimensions, and SUMMA (section 5.1).

data parallel   every matmul (P, 1, 1)
Megatron        a mesh d x m, matmuls in pairs: columns (d, m, 1), then rows (d, 1, m); the best mesh. Convolutions are
                data parallel; m devices are of one node where nodes have several, or all of it
SUMMA           every matmul on a mesh r x c: inputs go along rows, weights along columns
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.sbp.device_grid import Degree, Grid, Strategy, below, minus
from harness.sbp.matmul_chain import Chain, Matmul, Residual
from harness.sbp.memory_limit import TooLarge, held
from harness.sbp.shortest_path import Ends, Infeasible, Move, Route, Search
from harness.sbp.strategy_costs import INFINITE, Costs


def data_parallel(chain: Chain, costs: Costs, ends: Ends) -> list[Route]:
    """Returns the one route of data parallelism: every matmul has the strategy (P, 1, 1).

    Raises Infeasible where the samples do not divide."""
    alone = Strategy(costs.grid.all, costs.grid.none, costs.grid.none)
    return [_given(chain, costs, ends, dict.fromkeys((item.name for item in chain.matmuls), alone))]


def meshes(grid: Grid, two: bool = True, whole_nodes: bool = False) -> list[Degree]:
    """Returns the tensor parallel sizes of Megatron-LM's meshes; the rest of the grid is data parallel.

    With `two` False all devices split weights. Else, where nodes have several devices, some of a node split weights, or
    with `whole_nodes` all of them, and gradients are all-reduced across nodes.
    """
    if not two:
        return [grid.all]
    inside = grid.degree(1, grid.local) if grid.local > 1 else grid.all
    return [inside] if whole_nodes and grid.local > 1 else below(inside)


def megatron(chain: Chain, costs: Costs, ends: Ends, tensor: Sequence[Degree] | None = None) -> list[Route]:
    """Returns Megatron-LM's route on each mesh that divides all matmuls.

    `tensor` are the tensor parallel sizes to try (`meshes`), by default all of its two dimensions. Matmuls that cannot
    be split are data parallel, and so are convolutions. The embedding is split by words, as its head. Raises Infeasible
    where no mesh divides all matmuls.
    """
    routes = []
    for model in meshes(costs.grid) if tensor is None else tensor:
        try:
            route = _given(chain, costs, ends, _pairs(chain, costs, model))
        except Infeasible:
            continue
        if not any(isinstance(step, Move) for step in route.steps[1:-1]):  # heads that do not divide
            routes.append(route)
    if not routes:
        raise Infeasible("no mesh of Megatron's divides all matmuls")
    return routes


def cheapest(routes: Sequence[Route], search: Search, limit: float = INFINITE) -> Route:
    """Returns the route of least seconds that holds at most `limit` bytes on a device. Raises TooLarge where none
    does."""
    sizes = [held(route, search) for route in routes]
    fitting = [route for route, size in zip(routes, sizes, strict=True) if size <= limit]
    if not fitting:
        raise TooLarge(min(sizes))
    return min(fitting, key=lambda route: route.seconds)


def _given(chain: Chain, costs: Costs, ends: Ends, strategies: dict[str, Strategy]) -> Route:
    for item in chain.matmuls:
        if not costs.allows(item, strategies[item.name]):
            raise Infeasible(item.name, item.name)
    return Search(chain, costs, ends, strategies).route()


def _pairs(chain: Chain, costs: Costs, model: Degree) -> dict[str, Strategy]:
    grid = costs.grid
    data = minus(grid.all, model)
    columns, rows = Strategy(data, model, grid.none), Strategy(data, grid.none, model)
    strategies: dict[str, Strategy] = {}
    for items in _branches(chain):
        second = False
        for item in items:
            if item.whole or item.conv:
                strategies[item.name] = Strategy(grid.all, grid.none, grid.none)
                continue
            strategies[item.name] = rows if second or item.look_up else columns
            second = not (second or item.look_up)
    return strategies


def _branches(chain: Chain) -> Iterator[list[Matmul]]:
    """Yields rows whose pairs begin together: the matmuls of each branch, and those between branches."""
    row: list[Matmul] = []
    for item in chain.items:
        if isinstance(item, Residual):
            yield row
            yield [inner for inner in item.items if isinstance(inner, Matmul)]
            row = []
        elif isinstance(item, Matmul):
            row.append(item)
    yield row


@dataclass(frozen=True)
class Summa:
    """The best mesh of SUMMA, its seconds of communication of one training step, and the bytes that a device
    receives."""

    rows: Degree
    columns: Degree
    seconds: float
    bytes: float


def summa(chain: Chain, costs: Costs) -> Summa:
    """Returns the best mesh: forward each device receives |input| / rows + |weight| / columns, backward twice that, for
    every micro-batch."""
    meshes = ((rows, minus(costs.grid.all, rows)) for rows in below(costs.grid.all))
    return min((_on_mesh(chain, costs, *mesh) for mesh in meshes), key=lambda mesh: mesh.seconds)


def _on_mesh(chain: Chain, costs: Costs, rows: Degree, columns: Degree) -> Summa:
    size, seconds, received = costs.grid.size, 0.0, 0.0
    for item in chain.matmuls:
        inputs = 0.0 if item.look_up else item.input_elements * costs.element_bytes / size(rows)
        weights = item.weight_bytes / size(columns)
        for over, amount in ((columns, inputs), (rows, weights)):
            if size(over) > 1:
                share = amount * size(over) / (size(over) - 1)  # all of it is received
                seconds += 3 * costs.micro_batches * costs.collectives.seconds("all_gather", over, share)
                received += 3 * costs.micro_batches * amount
    return Summa(rows, columns, seconds, received)
