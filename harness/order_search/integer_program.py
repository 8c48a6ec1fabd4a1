"""The order as an integer program, for small cases: which of two tasks of a device runs first.

start(b) >= start(a) + seconds(a)           a before b, or else the other way round (big M: the times that are left)
kept(a) = sum of saved(b) * ([F(b) before a] - [W(b) before a]) + delayed(b) * ([I(b) before a] - [W(b) before a])
whole(b)    no task between I(b) and W(b), no delayed bytes, and the gradient leaves after W(b)

Micro-batches go in the order of their numbers. The solver's tolerances are absolute: times are parts of the known step
time here, bytes parts of a device's limit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations, product

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from harness.order_search.bounds import Paths, lower_bound
from harness.order_search.chain import Chain, Orders, Task, evaluate, fits

MOST_PAIRS = 450
"""Pairs of tasks on a device for which it is tried."""
NODES = 20_000
GAP = 1e-9
"""The relative gap at which the solver stops; its own default is 1e-4."""
LATEST = 1.001
"""A little more than the known step time, in the program's unit: tolerances do not make the known order infeasible."""


def solved(chain: Chain, best_s: float, seconds: float) -> tuple[float, Orders | None]:
    """Return a lower bound of all orders without recomputation, and orders that take less than `best_s`, where some are
    found.

    Halves are as fast as a whole pass or faster, so passes are whole only where delayed bytes do not fit, and, in what
    is returned, where that takes no longer.
    """
    program = _Program(_scaled(chain, best_s))
    if len(program.pairs) > MOST_PAIRS:
        return 0.0, None
    found = program.solve(seconds)
    bound_s = best_s * float(found.mip_dual_bound) if found.mip_dual_bound is not None else 0.0
    return bound_s, None if found.x is None else _joined(chain, program.orders(found.x))


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
    """Columns: the step time, the start of each task, for each pair of a device whether the first is earlier, and for
    each pass that may have to be whole whether it is."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        m, n = chain.micro_batches, chain.stages
        self.tasks: list[Task] = [(kind, j, i) for j in range(n) for kind in "FIW" for i in range(m)]
        self.column = {task: 1 + number for number, task in enumerate(self.tasks)}
        self.earliest, self.latest = _window(chain)
        self.pairs: dict[tuple[Task, Task], int] = {}
        self.known: set[tuple[Task, Task]] = set()
        self.by_device: dict[int, list[Task]] = defaultdict(list)
        for task in self.tasks:
            self.by_device[chain.devices[task[1]]].append(task)
        for own in self.by_device.values():
            for a, b in combinations(own, 2):
                if (before := self.fixed(a, b)) is None:
                    self.pairs[a, b] = 1 + len(self.tasks) + len(self.pairs)
                else:
                    self.known.add((a, b) if before else (b, a))
        self.count = 1 + len(self.tasks) + len(self.pairs)
        may_be_whole = [j for j in range(n) if _delays_too_much(chain, j)]
        self.whole = {one: self.count + number for number, one in enumerate(product(may_be_whole, range(m)))}
        self.count += len(self.whole)
        self.rows: list[tuple[dict[int, float], float]] = []
        self.order()
        self.memory()
        self.whole_passes()

    def fixed(self, a: Task, b: Task) -> bool | None:
        """Whether a is before b in any order whose micro-batches go in the order of their numbers.

        Some order of least time has them so. In any other one, the tasks of a kind and stage get the names 0, 1, ... in
        the order of time: the k-th of them still waits for the k-th of those before it, and stages keep as much. Where
        a whole pass overtakes a W that waits, this W and then the I take as long, and keep no more.
        """
        if a[2] <= b[2] and _leads_to(a, b):
            return True
        return False if b[2] <= a[2] and _leads_to(b, a) else None

    def at_least(self, terms: dict[int, float], value: float) -> None:
        """Adds a row: the sum of the terms is at least the value."""
        self.rows.append((terms, value))

    def order(self) -> None:
        chain = self.chain
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
            far = max(0.0, self.latest[a] + took_a - self.earliest[b])
            self.at_least({second: 1.0, first: -1.0, pair: -far}, took_a - far)
            far = max(0.0, self.latest[b] + took_b - self.earliest[a])
            self.at_least({first: 1.0, second: -1.0, pair: far}, took_b)

    def after(self, later: Task, earlier: Task, took: float) -> None:
        seconds = self.chain.task_s[earlier[0], earlier[1]] + took
        self.at_least({self.column[later]: 1.0, self.column[earlier]: -1.0}, seconds)

    def whole_passes(self) -> None:
        """What follows where a pass is whole."""
        _, backward = self.chain.arrivals
        for (j, i), whole in self.whole.items():
            halves: tuple[Task, Task] = ("I", j, i), ("W", j, i)
            for task in self.by_device[self.chain.devices[j]]:
                if task not in halves:
                    between, constant = self.sum_of([(halves[0], 1.0), (halves[1], -1.0)], task)
                    self.at_least({column: -value for column, value in between.items()} | {whole: -1.0}, constant - 1)
            for source, waits in enumerate(backward):
                for took in (took for target, took in waits if target == j):
                    far, later = self.latest[halves[1]] + self.chain.task_s["W", j] + took, ("I", source, i)
                    row = {self.column[later]: 1.0, self.column[halves[1]]: -1.0, whole: -far}
                    self.at_least(row, self.chain.task_s["W", j] + took - far)

    def memory(self) -> None:
        chain = self.chain
        for device, own in self.by_device.items():
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
        kind, stage, i = task
        amounts = []
        for one in own:
            saved, delayed = chain.of(chain.saved_bytes, one[1]), chain.of(chain.delayed_bytes, one[1])
            amounts.append((one, {"F": saved, "I": delayed, "W": -saved - delayed}[one[0]]))
        terms, constant = self.sum_of(amounts, task)
        constant += {"F": chain.of(chain.saved_bytes, stage), "I": chain.of(chain.working_bytes, stage), "W": 0}[kind]
        if kind == "W" and (whole := self.whole.get((stage, i))):
            terms[whole] = -chain.of(chain.delayed_bytes, stage)
        return terms, constant

    def sum_of(self, amounts: Iterable[tuple[Task, float]], task: Task) -> tuple[dict[int, float], float]:
        """The sum of the amounts of those that are before a task, as terms and a constant."""
        terms: dict[int, float] = defaultdict(float)
        constant = 0.0
        for one, amount in amounts:
            if one == task or not amount:
                continue
            column, sign = self.before(one, task)
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
        """Return what HiGHS finds; its presolve calls some of these programs infeasible whose solution is known."""
        lower, upper = np.zeros(self.count), np.ones(self.count)
        lower[0], upper[0] = min(LATEST, lower_bound(self.chain)), LATEST
        for task, column in self.column.items():
            lower[column], upper[column] = self.earliest[task], self.latest[task]
        whole = np.zeros(self.count)
        whole[1 + len(self.tasks) :] = 1
        cells = [(row, column, value) for row, (terms, _) in enumerate(self.rows) for column, value in terms.items()]
        rows, columns, values = (np.array(part) for part in zip(*cells, strict=True))
        matrix = coo_array((values, (rows, columns)), shape=(len(self.rows), self.count)).tocsr()
        cost = np.zeros(self.count)
        cost[0] = 1.0
        least = np.array([value for _, value in self.rows])
        options = {"time_limit": seconds, "node_limit": NODES, "mip_rel_gap": GAP, "presolve": False}
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
        return [_joined_halves(row, {b for b, column in self.whole.items() if x[column] > 0.5}) for row in rows]


def _window(chain: Chain) -> tuple[dict[Task, float], dict[Task, float]]:
    """Return when each task can begin and has to begin, in an order that takes no longer than `LATEST`."""
    earliest: dict[Task, float] = {}
    latest: dict[Task, float] = {}
    paths, m = Paths(chain), chain.micro_batches
    for j, i in product(range(chain.stages), range(m)):
        forward_s, input_s, weight_s = chain.forward_s[j], chain.input_s[j], chain.weight_s[j]
        earliest["F", j, i] = max(i * forward_s, paths.arrives(j, i))
        earliest["I", j, i] = paths.released(j, i)
        earliest["W", j, i] = earliest["I", j, i] + input_s
        latest["F", j, i] = LATEST - forward_s - paths.after_forward(j, m - i)
        latest["I", j, i] = LATEST - input_s - max(weight_s, paths.after_input(j, m - i))
        latest["W", j, i] = LATEST - weight_s
    return earliest, latest


def _delays_too_much(chain: Chain, stage: int) -> bool:
    """Whether halves may not fit where a whole pass does."""
    more = chain.of(chain.delayed_bytes, stage) > chain.of(chain.working_bytes, stage)
    return more and chain.limit(chain.devices[stage]) < float("inf")


def _joined(chain: Chain, orders: Orders) -> Orders:
    """Make whole passes of halves that follow one another, where that takes no longer."""
    step_s = evaluate(chain, orders).step_s
    for _, j, i in [task for row in orders for task in row if task[0] == "I"]:
        changed = [_joined_halves(row, {(j, i)}) for row in orders]
        if changed != orders and (one := evaluate(chain, changed)).step_s <= step_s and fits(chain, one):
            orders = changed
    return orders


def _joined_halves(order: list[Task], passes: set[tuple[int, int]]) -> list[Task]:
    """Make whole passes of these where their halves follow one another."""
    found: list[Task] = []
    for kind, j, i in order:
        if kind == "W" and (j, i) in passes and found[-1] == ("I", j, i):
            found[-1] = ("B", j, i)
        else:
            found.append((kind, j, i))
    return found


def _leads_to(a: Task, b: Task) -> bool:
    """Whether in one micro-batch b is a, or after it in any order."""
    (kind, stage, _), (other, target, _) = a, b
    if kind == "F":
        return other != "F" or stage <= target
    if kind == "I":
        return other != "F" and target <= stage
    return other == "W" and stage == target
