"""All stages that a chain has, as numpy columns, for dynamic programs over where stages begin and end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.plan import Stage
from planners.periodic.chain import Chain

Whole = npt.NDArray[np.int64]
NEVER = 2**62
"""More than any ticks and bytes."""


@dataclass(frozen=True)
class Spans:
    """Each is the layers `first`..`end` - 1. Those with one `first` stand together, in the order of their ends.

    `load` are ticks, `state` and `buffers` bytes, `stored` bytes of each micro-batch that is stored.
    """

    first: Whole
    end: Whole
    load: Whole
    state: Whole
    buffers: Whole
    stored: Whole

    @staticmethod
    def of(chain: Chain) -> Spans:
        first, end = np.triu_indices(chain.layers + 1, k=1)
        loads, states, stores, buffers = (
            np.array(values, dtype=np.int64) for values in (chain.loads, chain.states, chain.stores, chain.buffers)
        )
        load, state, stored = (before[end] - before[first] for before in (loads, states, stores))
        if chain.shared:
            state -= [chain.again([range(*span)]) for span in zip(first.tolist(), end.tolist(), strict=True)]
        return Spans(first, end, load, state, buffers[first] + buffers[end], stored)

    @property
    def rows(self) -> Whole:
        """Where those of each `first` begin."""
        return np.flatnonzero(np.diff(self.first, prepend=-1))

    def held(self, activations: int) -> Whole:
        """Bytes of a device with each of them and so many stored micro-batches (`Chain.held`)."""
        return self.state + self.buffers + activations * self.stored

    def only(self, chosen: npt.NDArray[np.bool_]) -> Spans:
        columns = (self.first, self.end, self.load, self.state, self.buffers, self.stored)
        return Spans(*(column[chosen] for column in columns))

    def least(self, values: Whole, boundaries: int) -> Whole:
        """For each boundary the least value of those that begin there, NEVER where none does."""
        found = np.full(boundaries, NEVER, dtype=np.int64)
        rows = self.rows
        if len(rows):
            found[self.first[rows]] = np.minimum.reduceat(values, rows)
        return found

    def partition(self, steps: Sequence[Whole]) -> tuple[Stage, ...]:
        """The stages that dynamic programming from the end of the chain has found, one on each device.

        `steps[n]` are the values of all spans with n stages behind them. Of equal ones the longest is taken.
        """
        found: list[Stage] = []
        first = 0
        for device, values in enumerate(reversed(steps)):
            row, until = np.searchsorted(self.first, (first, first + 1))
            end = int(self.end[until - 1 - values[row:until][::-1].argmin()])
            found.append(Stage(first, end - 1, device))
            first = end
        return tuple(found)
