"""The order as an integer program, for small cases: which of two tasks of a device runs first.

start(b) >= start(a) + seconds(a)           a before b, or else the other way round (big M: a known step time)
kept(F) = sum of saved(s) * ([F(s) before F] - [W(s) before F]) + saved <= limit

The solver's tolerances are absolute: times are parts of the known step time here, bytes parts of a device's limit.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import combinations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from harness.order_search.bounds import Paths
from harness.order_search.chain import Chain, Orders, Task
from harness.order_search.list_scheduling import tails_of

MOST_PAIRS = 700
"""Pairs of tasks on a device for which it is tried."""
NODES = 20_000
GAP = 1e-9
"""The relative gap at which the solver stops; its own default is 1e-4."""
INFEASIBLE = 2
LATEST = 1.0
"""The known step time, in the program's unit."""


def solved(chain: Chain, best_s: float, seconds: float) -> tuple[float, Orders | None]:
    """Return a lower bound of all orders without recomputation, and orders that take less than `best_s`, where some are
    found.

    A whole backward pass is never faster than its halves, but keeps no delayed bytes: the program counts none. So what
    it finds may not fit, and where two halves follow one another they are joined.
    """
    program = _Program(_scaled(chain, best_s))
    if len(program.pairs) > MOST_PAIRS:
        return 0.0, None
    found = program.solve(seconds)
    bound_s = best_s * float(found.mip_dual_bound) if found.mip_dual_bound is not None else 0.0
    if found.x is None:
        return (best_s if found.status == INFEASIBLE else bound_s), None
    return bound_s, program.orders(found.x)


def _scaled(chain: Chain, best_s: float) -> Chain:
    """Return the chain with times as parts of `best_s`."""

    def parts(times: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(one / best_s for one in times)

    messages = tuple(replace(one, seconds=one.seconds / best_s) for one in chain.messages)
    return replace(
        chain,
        forward_s=parts(chain.forward_s),
        input_s=parts(chain.input_s),
        weight_s=parts(chain.weight_s),
        messages=messages,
    )


class _Program:
    """Columns: the step time, the start of each task, and for each pair of a device whether the first is earlier."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        m, n = chain.micro_batches, chain.stages
        self.tasks: list[Task] = [(kind, j, i) for j in range(n) for kind in "FIW" for i in range(m)]
        self.column = {task: 1 + number for number, task in enumerate(self.tasks)}
        self.pairs: dict[tuple[Task, Task], int] = {}
        self.known: set[tuple[Task, Task]] = set()
        by_device: dict[int, list[Task]] = defaultdict(list)
        for task in self.tasks:
            by_device[chain.devices[task[1]]].append(task)
        for own in by_device.values():
            for a, b in combinations(own, 2):
                if (before := self.fixed(a, b)) is None:
                    self.pairs[a, b] = 1 + len(self.tasks) + len(self.pairs)
                else:
                    self.known.add((a, b) if before else (b, a))
        self.rows: list[tuple[dict[int, float], float]] = []
        self.order()
        self.memory(by_device)

    def fixed(self, a: Task, b: Task) -> bool | None:
        """Whether a is before b in any order: those of one micro-batch; those of stage 0, whose micro-batches are
        named in the order of their F."""
        chain = {"F": 0, "I": 2, "W": 3}
        if a[2] == b[2]:
            if a[1] == b[1]:
                return chain[a[0]] < chain[b[0]]
            way = {"F": a[1], "I": 2 * self.chain.stages - a[1]}
            other = {"F": b[1], "I": 2 * self.chain.stages - b[1]}
            if a[0] in way and b[0] in other:
                return way[a[0]] < other[b[0]]
            if a[0] == "F" or b[0] == "F":
                return a[0] == "F"
        if a[0] == b[0] == "F" and a[1] == b[1] == 0:
            return a[2] < b[2]
        return None

    def at_least(self, terms: dict[int, float], value: float) -> None:
        """Adds a row: the sum of the terms is at least the value."""
        self.rows.append((terms, value))

    def order(self) -> None:
        chain, big = self.chain, LATEST
        forward, backward = chain.arrivals
        for kind, j, i in self.tasks:
            end = {"F": forward, "I": backward}.get(kind)
            for other, took in end[j] if end else ():
                self.after((kind, j, i), (kind, other, i), took)
            if kind != "F":
                self.after((kind, j, i), ("F" if kind == "I" else "I", j, i), 0.0)
            self.at_least({0: 1.0, self.column[kind, j, i]: -1.0}, chain.task_s[kind, j])
        for a, b in self.known:
            self.after(b, a, 0.0)
        for (a, b), pair in self.pairs.items():
            first, second = self.column[a], self.column[b]
            took_a, took_b = chain.task_s[a[0], a[1]], chain.task_s[b[0], b[1]]
            self.at_least({second: 1.0, first: -1.0, pair: -big}, took_a - big)
            self.at_least({first: 1.0, second: -1.0, pair: big}, took_b)

    def after(self, later: Task, earlier: Task, took: float) -> None:
        seconds = self.chain.task_s[earlier[0], earlier[1]] + took
        self.at_least({self.column[later]: 1.0, self.column[earlier]: -1.0}, seconds)

    def memory(self, by_device: dict[int, list[Task]]) -> None:
        chain = self.chain
        for device, own in by_device.items():
            limit = chain.limit(device)
            if limit == float("inf"):
                continue
            for task in own:
                terms, constant = self.kept_at(task, own)
                unit = max(1.0, limit)
                self.at_least({column: -value / unit for column, value in terms.items()}, (constant - limit) / unit)

    def kept_at(self, task: Task, own: list[Task]) -> tuple[dict[int, float], float]:
        """Bytes while a task runs, as terms and a constant."""
        chain = self.chain
        kind, stage, _ = task
        terms: dict[int, float] = defaultdict(float)
        constant = float(chain.of(chain.saved_bytes, stage) if kind == "F" else 0)
        if kind == "I":
            constant += chain.of(chain.working_bytes, stage)
        for name, j, i in own:
            saved = chain.of(chain.saved_bytes, j)
            amount = {"F": saved, "I": 0, "W": -saved}[name]
            if (name, j, i) == task or not amount:
                continue
            column, sign = self.before((name, j, i), task)
            if column is None:
                constant += amount * sign
            else:
                terms[column] += amount * (1.0 if sign > 0 else -1.0)
                constant += 0.0 if sign > 0 else amount
        return terms, constant

    def before(self, a: Task, b: Task) -> tuple[int | None, int]:
        """The column of "a before b" with sign 1, of "b before a" with -1; or None with 1 or 0, where it is known."""
        if (a, b) in self.pairs:
            return self.pairs[a, b], 1
        if (b, a) in self.pairs:
            return self.pairs[b, a], -1
        return None, int((a, b) in self.known)

    def solve(self, seconds: float):  # type: ignore[no-untyped-def]
        chain, count = self.chain, 1 + len(self.tasks) + len(self.pairs)
        paths, tails = Paths(chain), tails_of(chain)
        heads = {("F", j): paths.head(j) for j in range(chain.stages)}
        heads |= {("I", j): paths.released(j, 0) for j in range(chain.stages)}
        heads |= {("W", j): heads["I", j] + chain.input_s[j] for j in range(chain.stages)}
        lower, upper = np.zeros(count), np.ones(count)
        upper[0] = LATEST
        for task, column in self.column.items():
            lower[column] = heads[task[0], task[1]]
            upper[column] = LATEST - tails[task[0], task[1]]
        whole = np.zeros(count)
        whole[1 + len(self.tasks) :] = 1
        cells = [(row, column, value) for row, (terms, _) in enumerate(self.rows) for column, value in terms.items()]
        rows, columns, values = (np.array(part) for part in zip(*cells, strict=True))
        matrix = coo_array((values, (rows, columns)), shape=(len(self.rows), count)).tocsr()
        cost = np.zeros(count)
        cost[0] = 1.0
        least = np.array([value for _, value in self.rows])
        options = {"time_limit": seconds, "node_limit": NODES, "mip_rel_gap": GAP}
        return milp(cost, integrality=whole, bounds=Bounds(lower, np.maximum(lower, upper)), options=options,
                    constraints=LinearConstraint(matrix, least - 1e-9))  # fmt: skip

    def orders(self, x: np.ndarray) -> Orders:
        rows: Orders = [[] for _ in range(self.chain.width)]
        after: dict[Task, int] = defaultdict(int)
        for _, b in self.known:
            after[b] += 1
        for (a, b), column in self.pairs.items():
            after[b if x[column] > 0.5 else a] += 1
        for task in sorted(self.tasks, key=lambda one: after[one]):
            rows[self.chain.devices[task[1]]].append(task)
        return [_joined(row) for row in rows]


def _joined(order: list[Task]) -> list[Task]:
    """Make a whole pass of halves that follow one another."""
    found: list[Task] = []
    for kind, j, i in order:
        if kind == "W" and found and found[-1] == ("I", j, i):
            found[-1] = ("B", j, i)
        else:
            found.append((kind, j, i))
    return found
