"""Ways up to a place as columns of integers, so that sums do not depend on the order in which things happen."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harness.sbp.edges import Edges
from harness.sbp.pareto import undominated

BITS = 51
"""Seconds and bytes of a way are below 2**BITS units."""


class Labels(NamedTuple):
    """An entry a way: where it is, in order, what it costs, and the way (of those before) and edge by which it came."""

    place: np.ndarray
    seconds: np.ndarray
    bytes: np.ndarray
    before: np.ndarray
    edge: np.ndarray

    def taken(self, which: np.ndarray) -> Labels:
        return Labels(*(column[which] for column in self))

    def along(self, edges: Edges, which: np.ndarray) -> Labels:
        """Every way by each of these edges that begins where it is, less what is dominated. The edges are in order.

        place 0  l l l   x   e e e e      a block of sums, all of an edge beside each other
        place 2  l l     x   e e          another one
        """
        places = np.unique(self.place)
        ways, on = (np.searchsorted(at, [places, places + 1]) for at in (self.place, edges.source[which]))
        keys = (edges.target[which] << BITS) + edges.bytes[which]
        columns = (self.bytes, keys), (self.seconds, edges.seconds[which])
        key, seconds = (
            np.concatenate([np.add.outer(right[c:d], left[a:b]).ravel() for a, b, c, d in zip(*ways, *on, strict=True)])
            for left, right in columns
        )
        kept = undominated(key, seconds, BITS)
        count = ways[1] - ways[0]
        begin = np.cumsum(count * (on[1] - on[0])) - count * (on[1] - on[0])
        block = np.searchsorted(begin, kept, "right") - 1
        edge, way = np.divmod(kept - begin[block], count[block])
        before, edge = ways[0][block] + way, which[on[0][block] + edge]
        return Labels(edges.target[edge], seconds[kept], self.bytes[before] + edges.bytes[edge], before, edge)
