"""MadPipe's first phase as printed (sections 4.2 and 5.1): a dynamic program on grids, and the search for its target.

For a target T^ the program T(l, p, t_P, m_P, V) is the least period of the first l layers on p processors, one of them
special (it may hold several stages): it already has t_P of load and m_P bytes, and V is the delay after layer l. With U
the load of layers k..l and g = ceil((V + U) / T^), it is the least of

    normal     max(U,       C(k-1), T(k-1, p-1, t_P,     m_P,                                V')) if g activations fit
    special    max(U + t_P, C(k-1), T(k-1, p,   t_P + U, m_P + those with g - 1 activations, V')) if m_P' <= M
    delay      V' = (V (+) U) (+) C(k-1), where the paper prints C(k)

t_P, m_P and V are rounded up on their grids; V may be beyond its last value. All of it grows with t_P, m_P and V. So
the search expands states from (L, P, 0, 0, 0), with their period so far, and drops dominated states of the same
boundary, which changes only the run time. For the same reason a grid that has all values of a coarser one never gives a
longer period for the same T^; this need not hold for other grids and for Algorithm 1 as a whole, whose targets change
with the grid.

The paper has no tied weights: here each stage of the special device counts shared state separately.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planners.periodic.label_search import Run, pareto_optimal
from planners.periodic.layer_ticks import Chain
from planners.periodic.min_period import Bound, stages_from_runs
from planners.periodic.one_f_one_b_star import delay_after, group_of

USED, LOAD, BYTES, DELAY, TIME, PARENT, END, SPECIAL, COLUMNS = range(9)
"""Rows of states: normal devices in use, positions on the grids of t_P, m_P and V, the period so far."""
ITERATIONS = 10


@dataclass(frozen=True)
class Grid:
    """The number of values of t_P in [0, U(1,L)], m_P in [0, M] and V in [0, U(1,L) + sum of C] , at least 2 each."""

    loads: int = 101
    sizes: int = 11
    delays: int = 51


def algorithm_1(chain: Chain, devices: int, grid: Grid | None = None, iterations: int = ITERATIONS) -> Bound | None:
    """Runs Algorithm 1: returns an allocation and its period max(T_i, T^_i), in ticks, rounded up; None if no T^_i has
    any.

    The paper prints lb = max(lb, min(T_i, T~_i)) and C(2)..C(L); meant are T^_i and C(1)..C(L-1). The period is neither
    the least of the allocation nor a lower bound: for that see `planners.periodic.min_period`.
    """
    low = target = max(1, -(-chain.loads[-1] // devices))
    high = max(low, chain.loads[-1] + sum(chain.crossing))
    best = None
    for _ in range(iterations):
        shorter = Program(chain, devices, target, grid or Grid()).shortest(high if best else high + 1)
        if shorter is None:
            low = max(low, target)
        else:
            period, runs = shorter
            low = max(low, min(period, target))
            if best is None or max(period, target) < high:
                high = max(period, target)
                best = Bound(high, stages_from_runs(runs))
        target = (low + high) // 2
    return best


class Program:
    """The dynamic program for the target `period` (T^), in ticks."""

    def __init__(self, chain: Chain, devices: int, period: int, grid: Grid) -> None:
        self.chain, self.normals = chain, devices - 1
        self.loads, self.stores, self.crossing = (np.array(v) for v in (chain.loads, chain.stores, chain.crossing))
        self.busy = np.array([chain.busy(boundary) for boundary in range(chain.layers + 1)])
        self.load_steps, self.size_steps, self.delay_steps = grid.loads - 1, grid.sizes - 1, grid.delays - 1
        self.most_load, self.most_bytes = max(1, chain.loads[-1]), max(1, chain.memory)
        self.most_delay = max(1, chain.loads[-1] + sum(chain.crossing))
        self.period = period * self.delay_steps  # delays are in parts of ticks

    def shortest(self, limit: int) -> tuple[int, list[Run]] | None:
        """Returns T(L, P, 0, 0, 0), rounded up to ticks, and its stages; None if it is `limit` or more."""
        waiting: list[list[np.ndarray]] = [[] for _ in range(self.chain.layers + 1)]
        waiting[-1].append(np.zeros((COLUMNS, 1), dtype=np.int64))
        kept: dict[int, np.ndarray] = {}
        for end in range(self.chain.layers, -1, -1):
            if waiting[end]:
                states = np.concatenate(waiting[end], axis=1)
                kept[end] = states[:, pareto_optimal(states[:PARENT])]
                for begin in range(end - 1, -1, -1):
                    if self.loads[end] - self.loads[begin] >= limit:
                        break
                    if self.busy[begin] < limit:
                        grown = self._extended(kept[end], begin, end, limit)
                        waiting[begin] += [grown] if grown.size else []
        if 0 not in kept:
            return None
        last = kept[0][:, kept[0][TIME].argmin()]
        return -(-int(last[TIME]) // self.load_steps), self._runs(kept, last)

    def _extended(self, states: np.ndarray, begin: int, end: int, limit: int) -> np.ndarray:
        """Returns the states with one more stage that may stay below the limit."""
        load, stored = self.loads[end] - self.loads[begin], self.stores[end] - self.stores[begin]
        delay = states[DELAY] * self.most_delay
        load_parts, crossing = load * self.delay_steps, self.crossing[begin] * self.delay_steps
        held = self.chain.held(begin, end - 1, 0) + (group_of(delay + load_parts, self.period) - 1) * stored
        next_delay = delay_after(delay_after(delay, load_parts, self.period), crossing, self.period)

        normal = states.copy()
        normal[USED] += 1
        normal[TIME] = np.maximum(states[TIME], load * self.load_steps)
        normal[SPECIAL] = 0
        fits = (normal[USED] <= self.normals) & (held + stored <= self.chain.memory)

        special = states.copy()
        together = states[LOAD] * self.most_load + load * self.load_steps
        size = states[BYTES] * self.most_bytes + held * self.size_steps
        special[LOAD], special[BYTES] = -(-together // self.most_load), -(-size // self.most_bytes)
        special[TIME] = np.maximum(states[TIME], together)
        special[SPECIAL] = 1

        both = np.concatenate([normal, special], axis=1)
        both[DELAY] = np.tile(-(-next_delay // self.most_delay), 2)
        both[TIME] = np.maximum(both[TIME], self.busy[begin] * self.load_steps)
        both[PARENT], both[END] = np.tile(np.arange(states.shape[1]), 2), end
        useful = np.concatenate([fits, size <= self.chain.memory * self.size_steps])
        return both[:, useful & self._may_fit(both, begin, limit)]

    def _may_fit(self, states: np.ndarray, boundary: int, limit: int) -> np.ndarray:
        """Returns whether the rest could be below the limit if spread evenly. A rounded t_P may be above the limit."""
        most = limit * self.load_steps
        free = (self.normals - states[USED]) * most + np.maximum(0, most - states[LOAD] * self.most_load)
        may_fit: np.ndarray = (states[TIME] < most) & (self.loads[boundary] * self.load_steps <= free)
        return may_fit

    def _runs(self, kept: dict[int, np.ndarray], state: np.ndarray) -> list[Run]:
        runs, first = [], 0
        while first < self.chain.layers:
            end = int(state[END])
            runs.append((first, end - 1, bool(state[SPECIAL])))
            state, first = kept[end][:, state[PARENT]], end
        return runs
