"""All ways through a part of a chain that are worth it for some price of a byte."""

from __future__ import annotations

import numpy as np

from harness.sbp.chain import Matmul, Residual
from harness.sbp.edges import Edges
from harness.sbp.matrix import Matrix, stay
from harness.sbp.optimum import Search, Section, branch


class Frontier:
    """Joins what `Search` takes the cheapest of, and keeps all that nothing dominates."""

    def __init__(self, search: Search) -> None:
        self.search, self._known = search.priced(0.0), dict[object, Edges]()

    def edges(self, section: Section) -> Edges:
        key = self.search.key(section)
        if key not in self._known:
            part, _, free = section
            if isinstance(part, Matmul):
                self._known[key] = self.search.product(section)
            elif isinstance(part, Residual):
                self._known[key] = self._residual(part, free)
            else:
                self._known[key] = _of_matrix(self.search.way(section))
        return self._known[key]

    def _residual(self, item: Residual, free: float) -> Edges:
        through, past = self._along(branch(item, free)), self.search.costs.moving(item.elements)
        source, target = through.source, through.target
        return Edges(
            source, target, through.seconds + past[source, target], through.bytes,
            lambda k: through.steps(k) + self.search.moved(item.elements, source[k], target[k], past=True),
        )  # fmt: skip

    def _along(self, sections: list[Section]) -> Edges:
        """The best ways through one section after the other."""
        found = _of_matrix(stay(len(self.search.costs.places)))
        for section in sections:
            found = found.then(self.edges(section))
        return found


def _of_matrix(matrix: Matrix) -> Edges:
    source, target = np.nonzero(np.isfinite(matrix.seconds))
    seconds = matrix.seconds[source, target]
    return Edges(
        source, target, seconds, np.zeros(len(seconds)), lambda k: matrix.steps(int(source[k]), int(target[k]))
    )
