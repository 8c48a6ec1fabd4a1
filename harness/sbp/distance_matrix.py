"""The cheapest path from every place to every other, for one weighting of seconds and bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from harness.sbp.pareto_edges import Edges
from harness.sbp.route import Steps
from harness.sbp.strategy_costs import INFINITE


class Matrix(NamedTuple):
    """Seconds from place to place, (places, places), and `steps(i, j)`, the steps of each of these paths."""

    seconds: np.ndarray
    steps: Callable[[int, int], Steps]


def along(start: Matrix, sections: Sequence[Matrix]) -> Matrix:
    """Returns the shortest paths from the start's rows through all `sections`, one after the other.

    `start.seconds` is (rows, places), that of a section (places, places); the result is (rows, places).
    """
    seconds, sources = start.seconds, []
    rows = np.arange(len(seconds))[:, None]
    for section in sections:
        source = (seconds[:, None, :] + np.ascontiguousarray(section.seconds.T)).argmin(2)
        seconds = seconds[rows, source] + section.seconds[source, np.arange(source.shape[1])]
        sources.append(source)

    def steps(i: int, j: int) -> Steps:
        parts: list[Steps] = []
        for section, source in zip(reversed(sections), reversed(sources), strict=True):
            k = int(source[i, j])
            parts.append(section.steps(k, j))
            j = k
        parts.append(start.steps(i, j))
        return [step for part in reversed(parts) for step in part]

    return Matrix(seconds, steps)


def still(seconds: np.ndarray) -> Matrix:
    """Returns a matrix of paths without steps."""
    return Matrix(seconds, lambda i, j: [])


def stay(places: int) -> Matrix:
    """Returns (places, places) with paths from each place to itself only."""
    return still(np.where(np.eye(places, dtype=bool), 0.0, INFINITE))


def cheapest(edges: Edges, places: int, scale: float, price: float) -> Matrix:
    """Returns (places, places): between each pair the edge with the least `scale` x seconds + `price` x bytes."""
    value = scale * edges.seconds + price * edges.bytes
    pair = edges.source * places + edges.target
    order = np.lexsort((value, pair))
    chosen = order[np.diff(pair[order], prepend=-1) > 0]
    seconds, number = np.full(places * places, INFINITE), np.zeros(places * places, dtype=np.int64)
    seconds[pair[chosen]], number[pair[chosen]] = value[chosen], chosen
    return Matrix(seconds.reshape(places, places), lambda i, j: edges.steps(int(number[i * places + j])))
