"""Which weights each micro-batch of a step sees, and in which copy of a stage's weights they are.

`harness.core.staleness` has what `engine.versions` means. With 2bw (PipeDream-2BW, Narayanan et al., arXiv 2006.09503,
section 3.1) a group of `every` micro-batches makes one update. Group k computes, forward and backward, with the weights
after max(k - 1, 0) updates, and its gradient makes those after k + 1 updates from the newest. Every step begins so
again.

    every = 2        0   1  |  2   3  |  4   5  |  6   7        micro-batches
    computes with      W0        W0        W1        W2
    makes              W1        W2        W3        W4
    copy               0         0         1         0          which computes; W2 goes where W0 was

So group k + 2 needs what group k makes, and a stage must be through with group k before it begins group k + 2.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from harness.core import divisors
from harness.core.op import Op
from harness.core.pattern import Pattern
from harness.core.plan import Plan
from harness.core.staleness import Corrections, Delay, delay, ended, of_group
from harness.schedule import Schedule
from harness.schedule.builders.periodic import unrolled
from harness.schedule.transfers import Transfer

COPIES_OF_2BW = 2
TIE = 1e-9
"""Tasks that begin so much of a period apart begin at once."""


def schedule(
    plan: Plan, pattern: Pattern, micro_batches: int, every: int, transfers: tuple[Transfer, ...] = ()
) -> Schedule:
    """A step of so many micro-batches; raises ValueError where the pattern places a stage elsewhere than the plan."""
    return unrolled(pattern, micro_batches, [stage.device for stage in plan.stages], transfers, every)


def allows(order: Schedule, micro_batches: int, every: int) -> bool:
    """Whether two versions suffice for this order of tasks: each group of a stage begins after all but one before it.

    A stage that stores `every` + 1 micro-batches at once, or fewer, is always allowed.
    """
    place = {op: number for queue in order.queues for number, op in enumerate(queue.ops)}
    firsts = range(2 * every, micro_batches, every)
    return all(
        place[Op(stage, "B", first - every - 1)] < place[Op(stage, "F", first)]
        for stage in range(len(order.devices))
        for first in firsts
    )


def stored(order: Schedule) -> list[int]:
    """Return, for each stage, the most micro-batches between the start of their forward and the end of their backward
    task."""
    now, most = [0] * len(order.devices), [0] * len(order.devices)
    for queue in order.queues:
        for op in queue.ops:
            if op.kind in ("F", "B"):
                now[op.stage] += 1 if op.kind == "F" else -1
                most[op.stage] = max(most[op.stage], now[op.stage])
    return most


def allowed(order: Schedule, micro_batches: int) -> list[int]:
    """Micro-batches for each update that two versions allow and that divide a step; the last is all of them."""
    return [every for every in divisors.list_divisors(micro_batches) if allows(order, micro_batches, every)]


@dataclass
class CopyPlan:
    """What the copies of one stage's weights hold during a step, each known by its number.

    `ahead[i]` says how many updates further than those that it finds the weights of the forward and of the backward
    task of micro-batch i are moved, `copies[i]` is the copy that it computes with. After k updates the newest weights
    are in copy `newest[k]`; with predicted weights they are apart, and `predicted[k]` lists the copies that get them,
    each with how many updates ahead. `late[k]` is the delay of update k. There are `count` copies.
    """

    ahead: list[tuple[int, int]]
    copies: list[int]
    newest: list[int]
    predicted: list[list[tuple[int, int]]]
    late: list[int]
    count: int


def tasks_of(order: Schedule) -> list[list[Op]]:
    """F, B and step of each stage, in the order in which its device runs them."""
    found: dict[int, list[Op]] = defaultdict(list)
    for queue in order.queues:
        for op in queue.ops if queue.name == "compute" else ():
            found[op.stage].append(op)
    return [own for _, own in sorted(found.items())]


def copy_plans(
    order: Schedule, pattern: Pattern, versions: str, every: int, corrections: Corrections
) -> list[CopyPlan]:
    """The copies of each stage."""
    return [
        copy_plan(own, versions, every, corrections, way_back)
        for own, way_back in zip(tasks_of(order), ways_back(pattern), strict=True)
    ]


def ways_back(pattern: Pattern) -> list[int]:
    """Backward tasks that each stage begins after that of a micro-batch, and not later than stage 0 begins its own:
    updates that are made until the micro-batch ends its way (`harness.core.staleness.ended`)."""
    starts = {
        placed.op.stage: placed.shift + placed.start_s / pattern.period_s
        for placed in pattern.ops
        if placed.op.kind == "B"
    }
    return [max(0, math.floor(starts[0] - start + TIE)) for _, start in sorted(starts.items())]


def copy_plan(tasks: Sequence[Op], versions: str, every: int, corrections: Corrections, way_back: int) -> CopyPlan:
    """The copies of a stage with these `tasks`, in the order in which its device runs them."""
    delays = stage_delays(tasks, versions, every, way_back)
    ahead = list(map(corrections.ahead, delays))
    groups = [delays[first : first + every] for first in range(0, len(delays), every)]
    late = [of_group(group) for group in groups]
    if versions == "none":  # one copy, which gets its weights before each task
        nothing: list[list[tuple[int, int]]] = [[] for _ in range(len(groups) + 1)]
        return CopyPlan(ahead, [0] * len(delays), [0] * len(nothing), nothing, late, 1)
    found = _Copies(tasks, delays, ahead, corrections.prediction).plan(late)
    return replace(found, count=max(found.count, COPIES_OF_2BW)) if versions == "2bw" else found


def stage_delays(tasks: Sequence[Op], versions: str, every: int, way_back: int = 0) -> list[Delay]:
    """The weights of each micro-batch of a stage with these `tasks`, of which `way_back` backward tasks begin until a
    micro-batch ends its way."""
    updates, before = 0, {}
    for op in tasks:
        updates += op.kind == "step"
        before[op.kind, op.micro_batch] = updates
    count = sum(op.kind == "F" for op in tasks)
    return [
        delay(versions, i // every, before["F", i], before["B", i], end=ended(i, way_back, every, count))
        for i in range(count)
    ]


Key = tuple[int, int]
"""Weights: after how many updates, and how many updates ahead they are predicted."""


@dataclass
class _Copies:
    """Finds a copy for all weights, each from when they are made until their last task."""

    tasks: Sequence[Op]
    delays: list[Delay]
    ahead: list[tuple[int, int]]
    prediction: bool
    last_use: dict[Key, int] = field(default_factory=dict)
    holds: list[Key] = field(default_factory=list)

    def plan(self, late: list[int]) -> CopyPlan:
        wanted: dict[int, set[Key]] = defaultdict(set)
        if not self.prediction:
            wanted |= {update: {(update, 0)} for update in range(len(late) + 1)}
        for place, op in enumerate(self.tasks):
            if op.kind == "B":
                assert op.micro_batch is not None
                key = self._key(op.micro_batch)
                self.last_use[key] = place
                wanted[key[0]].add(key)
        made = [-1, *(place for place, op in enumerate(self.tasks) if op.kind == "step")]
        where: dict[Key, int] = {}
        for update, place in enumerate(made):
            for key in sorted(wanted[update]):
                where[key] = self._free_copy(place, where.get((update - 1, 0)))
                self.holds[where[key]] = key
        copies = [where[self._key(i)] for i in range(len(self.delays))]
        newest = [] if self.prediction else [where[update, 0] for update in range(len(made))]
        ahead = [[(where[key], key[1]) for key in sorted(wanted[update])] for update in range(len(made))]
        predicted = ahead if self.prediction else [[] for _ in made]
        return CopyPlan(self.ahead, copies, newest, predicted, late, len(self.holds))

    def _key(self, i: int) -> Key:
        return self.delays[i].forward, self.ahead[i][0]

    def _free_copy(self, place: int, before: int | None) -> int:
        """A copy that no later task needs, first of all the one with the weights `before` the update."""
        order = range(len(self.holds)) if before is None else [before, *range(len(self.holds))]
        for copy in order:
            if self.last_use.get(self.holds[copy], -1) < place:
                return copy
        self.holds.append((-1, 0))
        return len(self.holds) - 1
