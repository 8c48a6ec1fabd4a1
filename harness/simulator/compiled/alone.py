"""A step in which nothing waits for a resource that flows share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.simulator.compiled.columns import Columns
from harness.simulator.compiled.tables import Numbers, Seconds, Tables, sliced


@dataclass(frozen=True)
class Alone:
    """The seconds of each node, and when it ends; `tables` say what it would share."""

    columns: Columns
    tables: Tables
    seconds: Seconds
    end_s: Seconds

    def flowing(self, nodes: Numbers) -> Numbers:
        """Returns those of the nodes that share something."""
        return nodes[self.tables.flow[nodes] >= 0]

    def demand(self, nodes: Numbers) -> tuple[Numbers, Seconds]:
        """Returns which shared resources flows of the nodes cross, and for how many seconds they need each of all."""
        tables, flows = self.tables, self.tables.flow[self.flowing(nodes)]
        owner, places = sliced(tables.uses_at, np.arange(len(tables.uses)), flows)
        uses = tables.uses[places]
        needed = tables.amount[flows][owner] * tables.times[places] / tables.capacity[uses]
        found: Seconds = np.bincount(uses, needed, minlength=len(tables.capacity)).astype(np.float64)
        return np.unique(uses), found
