"""The smallest period of given task orders, and the starts at it, exactly.

**Laps.** Let tasks i < j of the path share a resource. Within one period each runs once, alone, so between the starts
of i and j for the same micro-batch there is a whole number of periods, the `laps` K of the pair, and a rest: i runs
first, and j ends before i starts again.

    K T + d_i  <=  t_j - t_i  <=  (K + 1) T - d_j

                 |  i  |        | j |      |  i  |          T from i to i
                 t_i            '--- t_j - K T

Laps are orders and shifts in one: with t = x T + h T, 0 <= x < 1, K is h_j - h_i if i comes first within the period
(x_i < x_j), else h_j - h_i - 1. Laps say everything that is discrete: which of two tasks is first, and also how many
micro-batches a stage stores when a task starts (`planners.periodic.milp`). So if they are kept, memory does not
change (except for two tasks that both take no time: at one instant they have two numbers of laps; callers check memory
again). Shifts alone need not be kept: moving all tasks together by part of a period changes shifts, not laps.

**The smallest period.** All that is left are differences, t_j - t_i >= d - k T: a graph over the tasks. At a period T
there are starts if and only if no cycle is positive, sum d - T sum k <= 0. So the smallest period is the largest ratio
sum d / sum k of a cycle; it is found from below: while there is a positive cycle, T becomes its ratio. No period below
the ratio of a cycle is possible, each ratio is larger than the one before, and there are finitely many cycles. The
earliest starts are the longest paths from the first task. All numbers are integers or fractions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import combinations, pairwise

from harness.core.plan import Stage
from planners.periodic.layer_ticks import Chain
from planners.periodic.task_times import Task, Timing, path

Laps = Mapping[tuple[int, int], int]
"""For each pair (i, j), i < j, of positions in the path that share a resource: whole periods from i to j."""

Edge = tuple[int, int, int, int]
"""(i, j, d, k): t_j - t_i >= d - k T."""


def sharing(tasks: Sequence[Task]) -> list[list[int]]:
    """Returns the positions in the path of the tasks of each resource, in order."""
    positions_of: dict[tuple[int, ...], list[int]] = {}
    for place, task in enumerate(tasks):
        positions_of.setdefault(task.resource, []).append(place)
    return list(positions_of.values())


def laps_from_starts(tasks: Sequence[Task], starts: Sequence[Fraction | int], period: Fraction | int) -> Laps:
    """Returns the laps of starts that are valid at this period."""
    pairs = [pair for places in sharing(tasks) for pair in combinations(places, 2)]
    return {(i, j): int((starts[j] - starts[i] - tasks[i].ticks) // period) for i, j in pairs}


def retime(chain: Chain, stages: Sequence[Stage], laps: Laps) -> Timing | None:
    """Returns the timing with these laps and the smallest period, each task as early as possible; None if there is
    none.

    Memory is not checked: it is at most what `laps` imply.
    """
    tasks = path(chain, stages)
    edges = _edges(tasks, laps)
    period = Fraction(max(sum(tasks[place].ticks for place in places) for places in sharing(tasks)))
    while True:
        scale, length = period.denominator, period.numerator
        weighed = [(i, j, scale * d - length * k) for i, j, d, k in edges]
        starts, cycle = _longest(len(tasks), weighed)
        if not cycle:
            return Timing(chain, tuple(stages), period, tuple(Fraction(start, scale) for start in starts))
        ticks, periods = (sum(edges[number][part] for number in cycle) for part in (2, 3))
        if periods <= 0:
            return None
        period = Fraction(ticks, periods)


def _edges(tasks: Sequence[Task], laps: Laps) -> list[Edge]:
    """Returns the constraints between the starts of tasks; a task alone on its resource has none."""
    edges = [(i, j, tasks[i].ticks, 0) for i, j in pairwise(range(len(tasks)))]
    for (i, j), periods in laps.items():
        edges.append((i, j, tasks[i].ticks, -periods))
        edges.append((j, i, tasks[j].ticks, periods + 1))
    return edges


def _longest(nodes: int, edges: Sequence[tuple[int, int, int]]) -> tuple[list[int], list[int]]:
    """Returns the lengths of the longest paths from node 0, and no cycle; or the indices of the edges of a positive
    cycle.

    Bellman-Ford; every node can be reached.
    """
    unreached = -1 - sum(abs(weight) for _, _, weight in edges)
    lengths = [0] + [unreached * nodes] * (nodes - 1)
    last = [-1] * nodes
    for _ in range(nodes):
        changed = -1
        for number, (i, j, weight) in enumerate(edges):
            if lengths[i] + weight > lengths[j]:
                lengths[j] = lengths[i] + weight
                last[j] = number
                changed = j
        if changed < 0:
            return lengths, []
    return lengths, _cycle(changed, last, edges)


def _cycle(node: int, last: Sequence[int], edges: Sequence[tuple[int, int, int]]) -> list[int]:
    """Returns the edges of the cycle that precedes a node that changed in the last round, backwards."""
    for _ in range(len(last)):
        node = edges[last[node]][0]
    cycle, current = [], node
    while True:
        cycle.append(last[current])
        current = edges[last[current]][0]
        if current == node:
            return cycle
