"""Baselines of AutoDDL: data parallelism, Megatron-LM's two dimensions, and SUMMA (section 5.1).

data parallel   every matmul (P, 1, 1)
Megatron        a mesh d x m, matmuls in pairs: columns (d, m, 1), then rows (d, 1, m); the best mesh. Convolutions are
                data parallel; m devices are of one node where nodes have several, or all of it
SUMMA           every matmul on a mesh r x c: inputs go along rows, weights along columns (`harness.sbp.summa`)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from harness.sbp.device_grid import Degree, Grid, Strategy, Summa, below, minus
from harness.sbp.matmul_chain import Chain, Matmul, Residual, one_way
from harness.sbp.memory_limit import TooLarge, held, with_seconds
from harness.sbp.shortest_path import Ends, Infeasible, Move, Route, Search, Step
from harness.sbp.strategy_costs import INFINITE, Costs, Place


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


class Made(NamedTuple):
    """A route, the bytes that a device holds with it, and the most bytes that one matmul's exchanges of gradients
    need."""

    route: Route
    held: float
    exchange_bytes: float

    @classmethod
    def of(cls, route: Route, search: Search) -> Made:
        """Counts both. Exchanges of SUMMA's matmuls are not among those that a limit excludes."""
        needs = (
            search.costs.exchange_bytes(one.item, one.strategy)
            for one in route.steps
            if isinstance(one, Step) and isinstance(one.strategy, Strategy)
        )
        return cls(route, held(route, search), max(needs, default=0.0))


def cheapest(routes: Sequence[Made], limit: float = INFINITE, exchange_bytes: float = INFINITE) -> Route:
    """Returns the route of least seconds that holds at most `limit` bytes on a device. Raises TooLarge where none
    does, and Infeasible where exchanges of all need more than `exchange_bytes`."""
    able = [one for one in routes if one.exchange_bytes <= exchange_bytes]
    if not able:
        raise Infeasible("exchanges of gradients need more than their limit")
    fitting = [one.route for one in able if one.held <= limit]
    if not fitting:
        raise TooLarge(min(one.held for one in able))
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


def summa(chain: Chain, costs: Costs, ends: Ends) -> list[Route]:
    """Returns SUMMA's route on each mesh that divides all matmuls. Its tensors keep their blocks from matmul to matmul;
    convolutions, and what cannot be split, are data parallel.

    Input and output of the model are blocks, too (`ends` "free"). Raises Infeasible where no mesh divides all.
    """
    assert ends == "free", ends
    every = costs.grid.all
    routes = [_on_mesh(chain, costs, Summa(rows, minus(every, rows))) for rows in below(every)]
    found = [with_seconds(Route(tuple(steps), 0.0), costs) for steps in routes if steps]
    if not found:
        raise Infeasible("no mesh of SUMMA's divides all matmuls")
    return found


def _on_mesh(chain: Chain, costs: Costs, mesh: Summa) -> list[Step | Move]:
    """Returns the steps on one mesh; none where it does not divide all."""
    blocks, samples = Place(mesh.rows), Place(costs.grid.all)
    alone = Strategy(costs.grid.all, costs.grid.none, costs.grid.none)
    steps: list[Step | Move] = []
    at = blocks
    for number, item in enumerate(chain.matmuls):
        apart = item.whole or item.conv
        if not (costs.allows(item, alone) if apart else _divides(item, costs, mesh)):
            return []
        place = samples if apart else blocks
        if steps and at != place:
            steps.append(Move(one_way(item.input_elements, item.cut), at, place))
        at = place
        free = number == 0 and not item.look_up
        # a weight at both ends is held once, and counted with the last matmul
        reduced = not (number == 0 and item.tied and item.tied == chain.matmuls[-1].tied)
        steps.append(Step(item, alone if apart else mesh, place, place, free, reduced))
    whole = all(costs.can_be_placed(blocks, one.samples, one.heads, always=True) for one in chain.attentions)
    return steps if whole else []


def _divides(item: Matmul, costs: Costs, mesh: Summa) -> bool:
    """Returns whether samples are split by rows, and features both by rows and by columns."""
    summed = item.divided if item.look_up else item.inputs
    by_rows = costs.rules.padded or summed % costs.grid.size(mesh.rows) == 0
    sizes = (item.inputs, item.divided)
    return by_rows and all(costs.can_be_placed(Place(mesh.rows), item.samples, size) for size in sizes)
