"""Stages and their order together: each in turn, while the step gets faster.

    layers  0 ... 5 | 6 ... 11 | 12 ... 17      search the order of the planner's stages
                 <--|                           move 1, 2, 4, ... layers over boundaries, in the same order of tasks,
    layers  0 ... 3 | 4 ... 11 | 12 ... 17      while that is faster
    layers  0 ... 3 | 4 ... 11 | 12 ... 17      search the order again, and move layers again

Where no move is faster in the same order, a short search looks for another order of a few of the moved stages: those
with the least lower bounds. It is over when none of these is faster either.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, combinations

from harness.core.plan import Plan
from harness.core.problem import ProblemError
from harness.interfaces import Refused
from harness.order_search.bounds import lower_bound
from harness.order_search.list_scheduling import least_memory
from harness.order_search.plan_chain import Judge, Ordered, searched
from harness.order_search.search import CLOSE, SECONDS

IN_ALL = 30.0
"""Seconds for the stages and orders of one placement."""
SHORT = 2.0
"""Seconds of a short search of an order."""
BOUNDED = 40
"""Moves whose bounds are compared, of those with the least work on one device."""
TRIED = 5
"""Moves whose order is searched shortly."""

Balance = tuple[int, ...]
"""Layers of each stage."""


def searched_stages(
    plan: Plan, judge: Judge, refused: Refused, seconds: float = SECONDS, in_all: float = IN_ALL
) -> Ordered:
    """Return the plan with the stages and the order that were found, beginning with the stages of `plan`.

    `refused` says what keeps other stages from running, for example layers that must be in one. Each search of an order
    takes `seconds` at most, all of them `in_all`, give or take one second. By simulation the result is never slower
    than that of `searched`. The predictions have `planner_balance`, the layers of the stages of `plan`, and
    `planner_step_s`, with the fastest order that was found for them, where one fits. Raises ProblemError where no
    stages were found with an order that fits.
    """
    moves = _Moves(plan, judge, refused, seconds, time.monotonic() + in_all)
    figures: dict[str, object] = {"planner_balance": list(plan.balance)}
    try:
        best = searched(plan, judge, seconds)
        figures["planner_step_s"] = best.step_s
    except ProblemError as error:
        nothing, best = error, judge.simulated(plan, least_memory(judge.chain(plan)))
    while better := moves.better(best):
        best = better
    if best.missing_bytes:
        raise nothing
    return replace(best, plan=replace(best.plan, predicted=best.plan.predicted | figures))


class _Moves:
    """Moves of layers between the stages that a plan begins with."""

    def __init__(self, plan: Plan, judge: Judge, refused: Refused, seconds: float, until_s: float) -> None:
        self.begun, self.judge, self.refused, self.seconds, self.until_s = plan, judge, refused, seconds, until_s
        self.work_s = [0.0, *accumulate(layer.forward_s + layer.backward_s for layer in judge.layers(plan).layers)]

    def better(self, best: Ordered) -> Ordered | None:
        """Return better stages with the order that was searched for them; None where none were found, or time is up."""
        moved = best
        while further := self.moved(moved):
            moved = further
        if moved is not best:
            return self.searched(self.plan(moved.plan.balance), moved, self.seconds) or moved
        for plan in self.promising(best):
            if self.left_s() > 0 and (one := self.searched(plan, best, SHORT)) and one.is_better(best):
                return self.searched(plan, one, self.seconds) or one
        return None

    def moved(self, best: Ordered) -> Ordered | None:
        """Return the first move that is better with the same order of tasks."""
        for plan in self.moves(best):
            if self.left_s() < 0:
                break
            if (one := self.judge.simulated(plan, best.orders)).is_better(best):
                return one
        return None

    def promising(self, best: Ordered) -> list[Plan]:
        """Return moves for which another order may be better, those first that have the least bounds."""
        found: list[tuple[float, Plan]] = []
        for plan in self.moves(best):
            if self.left_s() < 0 or len(found) == BOUNDED:
                break
            found.append((lower_bound(self.judge.chain(plan)), plan))
        hopeful = [(bound_s, plan) for bound_s, plan in found if self.may_be_better(bound_s, best)]
        return [plan for _, plan in sorted(hopeful, key=lambda one: one[0])[:TRIED]]

    def moves(self, best: Ordered) -> Iterator[Plan]:
        """Yield moves that may be better and are not refused, those first whose busiest device has the least work."""
        worked = sorted((self.busiest_s(balance), balance) for balance in neighbors(best.plan.balance))
        for busiest_s, balance in worked:
            plan = self.plan(balance)
            if self.may_be_better(busiest_s, best) and not self.refused(plan):
                yield plan

    def may_be_better(self, bound_s: float, best: Ordered) -> bool:
        return bool(best.missing_bytes) or bound_s < best.step_s * (1 - CLOSE)

    def busiest_s(self, balance: Balance) -> float:
        """Return the seconds that the device with the most work computes in a step."""
        ends = [0, *accumulate(balance)]
        each = dict.fromkeys((stage.device for stage in self.begun.stages), 0.0)
        for number, stage in enumerate(self.begun.stages):
            each[stage.device] += self.work_s[ends[number + 1]] - self.work_s[ends[number]]
        return self.begun.micro_batches * max(each.values())

    def plan(self, balance: Balance) -> Plan:
        """Return the plan with these numbers of layers, without what the planner says of its own stages."""
        if balance == self.begun.balance:
            return self.begun
        stages = Plan.contiguous(balance).stages
        placed = tuple(replace(one, device=old.device) for one, old in zip(stages, self.begun.stages, strict=True))
        return replace(self.begun, stages=placed, pattern=None, predicted={})

    def searched(self, plan: Plan, before: Ordered, seconds: float) -> Ordered | None:
        """Search the order of a plan, for a second at least; None where none is found that fits."""
        try:
            return searched(plan, self.judge, min(seconds, max(1.0, self.left_s())), before.orders)
        except ProblemError:
            return None

    def left_s(self) -> float:
        return self.until_s - time.monotonic()


def neighbors(balance: Balance) -> Iterator[Balance]:
    """Yield the numbers of layers after each move of 1, 2, 4, ... layers from one stage to another; none becomes empty.

    The stages between these two keep their number: all of their boundaries move. (4, 3, 2) becomes (3, 3, 3).
    """
    for one, other in combinations(range(len(balance)), 2):
        for giver, taker in ((one, other), (other, one)):
            count = 1
            while count < balance[giver]:
                moved = list(balance)
                moved[giver] -= count
                moved[taker] += count
                yield tuple(moved)
                count *= 2
