"""The cheapest way from every place to every other, of one sum of seconds and bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from harness.sbp.costs import INFINITE
from harness.sbp.edges import Edges
from harness.sbp.route import Steps


class Matrix(NamedTuple):
    """Seconds from place to place, and what happens on each of these ways."""

    seconds: np.ndarray
    steps: Callable[[int, int], Steps]


def along(start: Matrix, ways: Sequence[Matrix]) -> Matrix:
    """The shortest ways from the start's rows through all `ways`, one after the other."""
    seconds, came = start.seconds, []
    rows = np.arange(len(seconds))[:, None]
    for way in ways:
        source = (seconds[:, None, :] + np.ascontiguousarray(way.seconds.T)).argmin(2)
        seconds = seconds[rows, source] + way.seconds[source, np.arange(source.shape[1])]
        came.append(source)

    def steps(i: int, j: int) -> Steps:
        found: list[Steps] = []
        for way, source in zip(reversed(ways), reversed(came), strict=True):
            k = int(source[i, j])
            found.append(way.steps(k, j))
            j = k
        found.append(start.steps(i, j))
        return [step for part in reversed(found) for step in part]

    return Matrix(seconds, steps)


def still(seconds: np.ndarray) -> Matrix:
    """A way on which nothing happens."""
    return Matrix(seconds, lambda i, j: [])


def stay(places: int) -> Matrix:
    """From each of so many places to itself only."""
    return still(np.where(np.eye(places, dtype=bool), 0.0, INFINITE))


def cheapest(edges: Edges, places: int, scale: float, price: float) -> Matrix:
    """The edges with the least `scale` x seconds + `price` x bytes."""
    value = scale * edges.seconds + price * edges.bytes
    pair = edges.source * places + edges.target
    order = np.lexsort((value, pair))
    chosen = order[np.diff(pair[order], prepend=-1) > 0]
    seconds, number = np.full(places * places, INFINITE), np.zeros(places * places, dtype=np.int64)
    seconds[pair[chosen]], number[pair[chosen]] = value[chosen], chosen
    return Matrix(seconds.reshape(places, places), lambda i, j: edges.steps(int(number[i * places + j])))
