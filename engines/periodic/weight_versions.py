"""Two versions of the weights, as in PipeDream-2BW (Narayanan et al., arXiv 2006.09503, section 3.1).

A group of `every` micro-batches makes one update. Group k computes, forward and backward, with the weights after
max(k - 1, 0) updates, and its gradient makes those after k + 1 updates from the newest. Every step begins so again.

    every = 2        0   1  |  2   3  |  4   5  |  6   7        micro-batches
    computes with      W0        W0        W1        W2
    makes              W1        W2        W3        W4         in the place of those that it computed with
    buffer             0         1         0         1

So group k + 2 needs what group k makes, and a stage must be through with group k before it begins group k + 2.
"""

from __future__ import annotations

from harness.core import divisors
from harness.core.op import Op
from harness.core.pattern import Pattern
from harness.core.plan import Plan
from harness.schedule import Schedule
from harness.schedule.builders.periodic import unrolled
from harness.schedule.transfers import Transfer

VERSIONS = 2


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
