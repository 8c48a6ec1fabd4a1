"""Pareto-optimal paths through a section of a chain that a route below a bound may take."""

from __future__ import annotations

import numpy as np

from harness.sbp.distance_matrix import Matrix, stay
from harness.sbp.matmul_chain import Matmul, Residual
from harness.sbp.pareto_edges import Edges
from harness.sbp.repeated_layers import entering
from harness.sbp.shortest_path import Search, Section, branch


class ParetoSections:
    """Joins Pareto-optimal edges, where `Search` keeps only the cheapest.

    `room` (places, places) is the most that a path may cost, in seconds plus the price of its bytes.

    i --section-- m --section-- j     up to m a path may cost what it may cost up to some j, less the cheapest path
                                      from m to j
    """

    def __init__(self, search: Search, price: float) -> None:
        self.search, self.priced, self.price = search.priced(0.0), search.priced(price), price

    def edges(self, section: Section, room: np.ndarray) -> Edges:
        if isinstance(section.part, Residual):
            return self._below(self._residual(section.part, section.free, room), room)
        return self._below(self._single(section), room)

    def _single(self, section: Section) -> Edges:
        if isinstance(section.part, Matmul):
            return self.search.matmul(section)
        return _of_matrix(self.search.shortest(section))

    def _residual(self, item: Residual, free: float, room: np.ndarray) -> Edges:
        elements = entering(item)
        past = self.search.costs.moving(elements)
        through = self._along(branch(item, free), room - past)
        source, target = through.source, through.target
        return Edges(
            source,
            target,
            through.seconds + past[source, target],
            through.bytes,
            lambda k: through.steps(k) + self.search.moved(elements, source[k], target[k], past=True),
        )

    def _along(self, sections: list[Section], room: np.ndarray) -> Edges:
        """Returns the Pareto-optimal paths through one section after the other."""
        rooms = [room]
        for section in reversed(sections):
            rooms.append((rooms[-1][:, None, :] - self.priced.shortest(section).seconds).max(2))
        edges = self._below(_of_matrix(stay(len(room))), rooms.pop())
        for section in sections:
            edges = self._below(edges.then(self._single(section)), rooms.pop())
        return edges

    def _below(self, edges: Edges, room: np.ndarray) -> Edges:
        value = edges.seconds + self.price * edges.bytes
        return edges.taken(np.flatnonzero(value < room[edges.source, edges.target]))


def _of_matrix(matrix: Matrix) -> Edges:
    source, target = np.nonzero(np.isfinite(matrix.seconds))
    seconds = matrix.seconds[source, target]
    return Edges(
        source, target, seconds, np.zeros(len(seconds)), lambda k: matrix.steps(int(source[k]), int(target[k]))
    )
