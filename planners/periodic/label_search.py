"""Label setting: decides whether an allocation with a period exists, by all paths from the end of the network.

A label is a placement of the layers after a boundary: how many normal devices it uses, the load and the bytes of the
special device (which may hold several stages), what it has of shared state, and the delay there (all as in
`planners.periodic.min_period`).

    boundary        k                         L
    layer    0 .. k-1 | k ..              L-1 |
             to place | placed: a label at k  |
                      |------- forward ------>|
                      |<------ backward ------|   delay, with all waiting

A label is removed if it is

    dominated   another one at its boundary is nowhere larger: each continuation of it is possible for the other one,
                too, with nothing larger, since x (+) y grows with x. In a later group a stage stores one more for sure,
                which is what it would store once more in the earlier one. A neighbour of a special stage is never on
                the special device, so that a normal stage at the front is the smaller label.
    cannot fit  the special device has less left than a lower bound of what the rest needs. That is computed for each
                boundary and number of normal devices, for several weighted sums of ticks and bytes: a shortest path
                from the front, in which each stage has the least delay of any label after it, and so the least group.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise

import numpy as np

from planners.periodic.layer_ticks import Chain
from planners.periodic.one_f_one_b_star import delay_after, delay_after_message, group_of
from planners.periodic.stage_ranges import Spans

PARENT, END, NORMALS, LOAD, BYTES, OPEN, FULLEST, DELAY, SPECIAL, LACKS = range(10)
"""Rows of labels. Provenance: the index of a label at the boundary `END` where its first stage ends. Then, the smaller
the better: normal devices in use; of the special device the ticks, the bytes with g - 1 activations, these plus once
more what it stores in the group of the delay, and plus the maximum of that over groups; ticks of delay; 1 if the first
stage is on the special device. From `LACKS` on, for each of `Chain.shared` 1 if the special device lacks it."""
MIXES = np.array([(1, 0), (0, 1), (1, 1), (2, 1), (1, 2), (4, 1), (1, 4)])
"""Weights of ticks and of bytes in the lower bound of what the special device still needs."""
NEVER = 2**60
"""More than any ticks or bytes, twice of it still an integer of 64 bits."""
BLOCK = 32
"""The number of labels that are compared with all others at once."""
EARLIER = np.triu(np.ones((BLOCK, BLOCK), dtype=bool), 1)
Run = tuple[int, int, bool]
"""First and last layer of a stage, and whether it is on the special device."""


class Search:
    """The labels of a chain on `devices`, the special one included."""

    def __init__(self, chain: Chain, devices: int) -> None:
        self.chain, self.normals = chain, devices - 1
        self.loads, self.stores, self.crossing = (np.array(v) for v in (chain.loads, chain.stores, chain.crossing))
        self.busy = np.array([chain.busy(boundary) for boundary in range(chain.layers + 1)])
        spans = Spans.from_chain(chain)
        self.fixed = np.zeros((chain.layers + 1, chain.layers + 1), dtype=np.int64)
        self.fixed[spans.first, spans.end] = spans.held(0)
        self.shared = np.array([shared_state.bytes for shared_state in chain.shared], dtype=np.int64)
        owners = np.zeros((len(chain.shared), chain.layers + 1), dtype=np.int64)
        for number, shared_state in enumerate(chain.shared):
            owners[number, np.array(shared_state.layers) + 1] = 1
        self.owners = owners.cumsum(1)

    def at(self, period: int) -> Round:
        return Round(self, period)


class Round:
    """The search with one period.

    Its arrays have an entry for each possible stage, from a boundary `begin` to a boundary `end`: sorted by their
    end, those of end e are `window(e)`, one for each boundary begin = first[e]..e - 1.
    """

    def __init__(self, search: Search, period: int) -> None:
        self.search, self.period = search, period
        self.layers, self.memory = search.chain.layers, search.chain.memory
        ends = np.arange(self.layers + 1)
        first = np.searchsorted(search.loads, search.loads - period)
        first[0] = 0
        self.first, counts = first.tolist(), ends - first
        self.offset = np.concatenate([[0], np.cumsum(counts)]).tolist()
        self.end = end = np.repeat(ends, counts)
        self.begin = begin = np.arange(len(end)) - np.repeat(np.array(self.offset[:-1]) - first, counts)
        self.load = search.loads[end] - search.loads[begin]
        self.stored = search.stores[end] - search.stores[begin]
        self.fixed = search.fixed[begin, end]
        owners = search.owners
        self.has = owners[:, end] > owners[:, begin]  # (shared, stages)
        self.elsewhere = search.shared @ (
            self.has & (owners[:, end] < owners[:, -1:])
        )  # bytes that a later stage may have
        self.crossing = search.crossing[begin]
        self.open = search.busy[begin] <= period

    def _window(self, end: int) -> slice:
        return slice(self.offset[end], self.offset[end + 1])

    def _grown(self, delay: np.ndarray, load: np.ndarray, crossing: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the group of a stage before a delay, and the delay with the stage and the message before it added."""
        delay = delay_after(delay, load, self.period)
        with_message = delay_after_message(self.search.chain.duplex, delay, crossing, self.period)
        return group_of(delay, self.period), with_message

    @cached_property
    def least_delay(self) -> np.ndarray:
        """(boundaries,): the least delay of any label at each boundary; NEVER where there is none."""
        least = np.full(self.layers + 1, NEVER)
        least[-1] = 0
        for end in range(self.layers, 0, -1):
            if least[end] < NEVER:
                window = self._window(end)
                group, delay = self._grown(least[end], self.load[window], self.crossing[window])
                possible = self.open[window] & (self.fixed[window] + group * self.stored[window] <= self.memory)
                least_before = least[self.first[end] : end]
                np.minimum(least_before, delay, out=least_before, where=possible)
        return least

    @cached_property
    def rest(self) -> np.ndarray:
        """(2, boundaries, normal devices left, mixes): a lower bound of what the layers before a boundary need of the
        special device, in each mix of ticks and bytes; [1] where the stage after the boundary is on the special
        device."""
        needed = np.full((2, self.layers + 1, self.search.normals + 1, len(MIXES)), NEVER)
        either, normal = needed
        needed[:, 0] = 0
        delay = self.least_delay[self.end]
        reachable = delay < NEVER
        group, _ = self._grown(np.where(reachable, delay, 0), self.load, self.crossing)
        fewest = self.fixed + (group - 1) * self.stored
        possible = self.open & reachable & (fewest + self.stored <= self.memory)
        closed = np.where(possible, 0, NEVER)[:, None]
        cost = (closed + self._mixed(self.load, fewest - self.elsewhere))[:, None]
        closed = closed[:, None]
        for end in range(1, self.layers + 1):
            window, begin = self._window(end), slice(self.first[end], end)
            if self.first[end] < end:
                np.minimum((either[begin, :-1] + closed[window]).min(0), NEVER, out=normal[end, 1:])
                np.minimum((normal[begin] + cost[window]).min(0), normal[end], out=either[end])
        return needed

    def _mixed(self, load: np.ndarray | int, size: np.ndarray | int) -> np.ndarray:
        """Returns (..., mixes): the weighted sums of ticks and bytes, scaled to similar size."""
        ticks, octets = max(1, self.memory // self.period), max(1, self.period // max(1, self.memory))
        mixed: np.ndarray = np.multiply.outer(load, MIXES[:, 0] * ticks) + np.multiply.outer(size, MIXES[:, 1] * octets)
        return mixed

    def cannot_fit(self) -> bool:
        """Return whether a lower bound of the special device's needs exceeds it; much faster than the search."""
        return bool((self.rest[0, -1, -1] > self._budget).any())

    @cached_property
    def _budget(self) -> np.ndarray:
        return self._mixed(self.period, self.memory)

    def allocation(self) -> list[Run] | None:
        """Returns the stages of an allocation with this period, from the front; None if there is none."""
        if self.cannot_fit():
            return None
        waiting: list[list[np.ndarray]] = [[] for _ in range(self.layers + 1)]
        waiting[-1].append(np.repeat([0, 1], [LACKS, len(self.search.shared)])[:, None])
        kept: dict[int, np.ndarray] = {}
        for end in range(self.layers, 0, -1):
            if not waiting[end]:
                continue
            labels = np.concatenate(waiting[end], axis=1)
            labels = kept[end] = labels[:, pareto_optimal(labels[NORMALS:])]
            begin, grown = self._grown_labels(labels, end)
            if not len(begin):
                continue
            if begin[0] == 0:
                return self._runs(kept, grown[:, 0])
            places = [0, *(np.flatnonzero(np.diff(begin)) + 1).tolist(), len(begin)]
            for start, stop in pairwise(places):
                waiting[begin[start]].append(grown[:, start:stop])
        return None

    def _grown_labels(self, labels: np.ndarray, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the labels with one more stage that can still fit, sorted by boundary, and their boundaries."""
        window = self._window(end)
        stored = self.stored[window, None]
        group, with_message = self._grown(labels[DELAY], self.load[window, None], self.crossing[window, None])
        fewest = self.fixed[window, None] + (group - 1) * stored
        fits = self.open[window, None] & (fewest + stored <= self.memory)
        normal = np.nonzero(fits & (labels[NORMALS] < self.search.normals))
        special = np.nonzero(fits & (labels[SPECIAL] == 0))
        stage, label = (np.concatenate(both) for both in zip(normal, special, strict=True))
        on_special = slice(len(normal[0]), None)
        grown, stage_group, delay = labels[:, label], group[stage, label], with_message[stage, label]
        grown[NORMALS, : on_special.start] += 1
        grown[SPECIAL] = 0
        _close(grown, group_of(grown[DELAY], self.period) < stage_group)
        self._take(grown[:, on_special], window.start + stage[on_special], fewest[special])
        _close(grown, stage_group < group_of(delay, self.period))
        grown[DELAY], grown[PARENT], grown[END] = delay, label, end
        begin = self.first[end] + stage
        useful = self._useful(begin, grown)
        useful = useful[np.argsort(begin[useful], kind="stable")]
        return begin[useful], grown[:, useful]

    def _take(self, labels: np.ndarray, stages: np.ndarray, fewest: np.ndarray) -> None:
        """Adds one of the `stages` to the special device; with g - 1 activations it needs the `fewest` bytes."""
        has = self.has[:, stages]
        size = fewest - self.search.shared @ (has & (labels[LACKS:] == 0))
        labels[LACKS:] &= ~has
        labels[SPECIAL] = 1
        labels[LOAD] += self.load[stages]
        labels[BYTES] += size
        labels[OPEN] += size + self.stored[stages]
        labels[FULLEST] = np.maximum(labels[FULLEST] + size, labels[OPEN])

    def _useful(self, boundary: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Returns the indices of labels that leave at least the lower bound of what the rest needs of the special
        device."""
        left = self.search.normals - labels[NORMALS]
        needed = self.rest[labels[SPECIAL], boundary, left] + self._mixed(labels[LOAD], labels[FULLEST])
        return np.flatnonzero((needed <= self._budget).all(1))

    def _runs(self, kept: dict[int, np.ndarray], label: np.ndarray) -> list[Run]:
        runs, first = [], 0
        while first < self.layers:
            end = int(label[END])
            runs.append((first, end - 1, bool(label[SPECIAL])))
            label, first = kept[end][:, label[PARENT]], end
        return runs


def pareto_optimal(labels: np.ndarray) -> np.ndarray:
    """Returns the indices of Pareto-optimal columns: no other one is as small or smaller in each row; of equal ones
    one.

    Sorted by their sums, none is dominated by a later one, unless the two are equal.
    """
    left = np.argsort(labels.sum(0), kind="stable")
    kept = []
    while len(left):
        block, left = left[:BLOCK], left[BLOCK:]
        below = _dominates(labels[:, block], labels[:, block])
        block = block[~(below & EARLIER[: len(block), : len(block)]).any(0)]
        kept.append(block)
        left = left[~_dominates(labels[:, block], labels[:, left]).any(0)]
    return np.concatenate(kept)


def _close(labels: np.ndarray, later: np.ndarray) -> None:
    """Resets the group's bytes where the delay is in a `later` group: the special device stores nothing there yet."""
    labels[OPEN] = np.where(later, labels[BYTES], labels[OPEN])


def _dominates(ones: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Returns (ones, others): whether a column is nowhere larger than another."""
    return np.asarray((ones[:, :, None] <= others[:, None, :]).all(0))
