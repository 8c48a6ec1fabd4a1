"""All ways through a section of a chain that nothing dominates and that a route below a bound may go."""

from __future__ import annotations

import numpy as np

from harness.sbp.chain import Matmul, Residual
from harness.sbp.edges import Edges
from harness.sbp.matrix import Matrix, stay
from harness.sbp.optimum import Search, Section, branch


class Frontier:
    """Joins what `Search` takes the cheapest of. `room` (places, places) is what a way may take, at a price of a byte.

    i --section-- m --section-- j     up to m a way may take what it may take up to some j, less the cheapest way
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
            return self.search.product(section)
        return _of_matrix(self.search.way(section))

    def _residual(self, item: Residual, free: float, room: np.ndarray) -> Edges:
        past = self.search.costs.moving(item.elements)
        through = self._along(branch(item, free), room - past)
        source, target = through.source, through.target
        return Edges(
            source, target, through.seconds + past[source, target], through.bytes,
            lambda k: through.steps(k) + self.search.moved(item.elements, source[k], target[k], past=True),
        )  # fmt: skip

    def _along(self, sections: list[Section], room: np.ndarray) -> Edges:
        """The best ways through one section after the other."""
        rooms = [room]
        for section in reversed(sections):
            rooms.append((rooms[-1][:, None, :] - self.priced.way(section).seconds).max(2))
        found = self._below(_of_matrix(stay(len(room))), rooms.pop())
        for section in sections:
            found = self._below(found.then(self._single(section)), rooms.pop())
        return found

    def _below(self, edges: Edges, room: np.ndarray) -> Edges:
        value = edges.seconds + self.price * edges.bytes
        return edges.taken(np.flatnonzero(value < room[edges.source, edges.target]))


def _of_matrix(matrix: Matrix) -> Edges:
    source, target = np.nonzero(np.isfinite(matrix.seconds))
    seconds = matrix.seconds[source, target]
    return Edges(
        source, target, seconds, np.zeros(len(seconds)), lambda k: matrix.steps(int(source[k]), int(target[k]))
    )
