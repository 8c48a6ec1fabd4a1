"""All possible stages of a chain, as numpy columns, for dynamic programs over where stages begin and end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.core.plan import Stage
from planners.periodic.layer_ticks import Chain

Whole = npt.NDArray[np.int64]
NEVER = 2**62
"""Infinity: more than any ticks and bytes."""


@dataclass(frozen=True)
class Spans:
    """Spans of layers `first`..`end` - 1, sorted by `first` and then by `end`.

    `load` are ticks, `state` and `buffers` bytes, `stored` bytes of each micro-batch that is stored.
    """

    first: Whole
    end: Whole
    load: Whole
    state: Whole
    buffers: Whole
    stored: Whole

    @staticmethod
    def from_chain(chain: Chain) -> Spans:
        first, end = np.triu_indices(chain.layers + 1, k=1)
        loads, states, stores, buffers = (
            np.array(values, dtype=np.int64) for values in (chain.loads, chain.states, chain.stores, chain.buffers)
        )
        load, state, stored = (before[end] - before[first] for before in (loads, states, stores))
        if chain.shared:
            state -= [chain.counted_twice([range(*span)]) for span in zip(first.tolist(), end.tolist(), strict=True)]
        return Spans(first, end, load, state, buffers[first] + buffers[end], stored)

    @property
    def rows(self) -> Whole:
        """The index of the first span of each `first`."""
        return np.flatnonzero(np.diff(self.first, prepend=-1))

    def held(self, activations: int) -> Whole:
        """Returns the bytes of a device with each span and `activations` stored micro-batches (`Chain.held`)."""
        return self.state + self.buffers + activations * self.stored

    def only(self, chosen: npt.NDArray[np.bool_]) -> Spans:
        columns = (self.first, self.end, self.load, self.state, self.buffers, self.stored)
        return Spans(*(column[chosen] for column in columns))

    def least(self, values: Whole, boundaries: int) -> Whole:
        """Returns for each boundary the least value of the spans that begin there, NEVER where none does."""
        least = np.full(boundaries, NEVER, dtype=np.int64)
        rows = self.rows
        if len(rows):
            least[self.first[rows]] = np.minimum.reduceat(values, rows)
        return least

    def partition(self, steps: Sequence[Whole]) -> tuple[Stage, ...]:
        """Returns the stages of a dynamic program from the end of the chain, one on each device.

        `steps[n]` are the values of all spans with n stages after them. Of equal ones the longest is taken.
        """
        stages: list[Stage] = []
        first = 0
        for device, values in enumerate(reversed(steps)):
            row, until = np.searchsorted(self.first, (first, first + 1))
            end = int(self.end[until - 1 - values[row:until][::-1].argmin()])
            stages.append(Stage(first, end - 1, device))
            first = end
        return tuple(stages)
