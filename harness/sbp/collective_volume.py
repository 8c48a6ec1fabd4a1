"""The collectives of a training step that follows a route."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from harness.sbp import summa
from harness.sbp.device_grid import Degree, Summa, plus
from harness.sbp.matmul_chain import OneWay
from harness.sbp.shortest_path import Move, Route, Step
from harness.sbp.strategy_costs import Costs


class Message(NamedTuple):
    """A collective over the devices of `degree`, `times` in a step; `size` is its buffer in bytes, as defined in
    `harness.sbp.collective_costs`."""

    name: str
    phase: str
    degree: Degree
    size: float
    times: int


def messages(route: Route, costs: Costs) -> Iterator[Message]:
    """Yields all collectives of a step, matmul by matmul."""
    for step in route.steps:
        yield from _moved(step, costs) if isinstance(step, Move) else _multiplied(step, costs)


def _moved(step: Move, costs: Costs) -> Iterator[Message]:
    size = step.elements * costs.element_bytes / costs.grid.size(costs.grid.all)
    for phase in ("forward",) if isinstance(step.elements, OneWay) else ("forward", "backward"):
        yield Message("all_to_all", phase, costs.moved(step.source, step.target), size, costs.micro_batches)


def _multiplied(step: Step, costs: Costs) -> Iterator[Message]:
    m, item = costs.micro_batches, step.item
    if isinstance(step.strategy, Summa):
        for call in summa.calls(item, costs.grid, step.strategy, costs.element_bytes, step.free):
            yield Message(call.name, call.phase, call.degree, call.size, call.times * m)
        return
    p0, p1, p2 = step.strategy
    size, width = costs.grid.size, costs.element_bytes
    if not (step.free or item.look_up):
        entering = item.input_elements * width / size(plus(p0, p2))
        yield Message("all_gather", "forward", p1, entering, m)
        if not item.cut:
            yield Message("reduce_scatter", "backward", p1, entering, m)
    leaving = item.output_elements * width / size(plus(p0, p1))
    for share in item.shares:
        yield Message("reduce_scatter", "forward", p2, leaving * share, m)
        if not (item.cut and item.frozen):
            yield Message("all_gather", "backward", p2, leaving * share, m)
        if step.reduced and not item.frozen:
            yield Message("all_reduce", "weights", p0, item.weight_bytes * share / size(plus(p1, p2)), 1)
