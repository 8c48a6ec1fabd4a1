"""What a schedule leaves out of a frozen prefix: layers before all that are trained.

    stage            0 (frozen)     1 (its first layers are frozen)     2
    backward pass    B, empty       B, down to its first trained layer  B
    messages back              <- none                       <- gradients

A backward task without work stays where it is: orders of tasks are fixed data, and files have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from harness.core.model_profile import ModelProfile
from harness.core.op import Op
from harness.core.plan import Plan
from harness.schedule import QueueOps, Schedule
from harness.schedule.dependency_graph import MESSAGES


def without_frozen(schedule: Schedule, plan: Plan, profile: ModelProfile, messages: bool = True) -> Schedule:
    """Returns the schedule without recomputations of stages whose layers are all in the frozen prefix, and without the
    `messages` that would bring gradients of what the prefix makes."""
    sources = {skip.name: skip.source for skip in profile.skips}
    return leave_out(schedule, plan, profile.frozen_prefix, sources, messages)


def leave_out(
    schedule: Schedule, plan: Plan, prefix: int, sources: Mapping[str, int], messages: bool = True
) -> Schedule:
    """As `without_frozen`, of the first `prefix` layers; `sources` are the layers that stash skips, by their names."""
    if not prefix:
        return schedule

    def is_needed(op: Op) -> bool:
        if op.kind == "R":
            return plan.stages[op.stage].last >= prefix
        if not messages or op.kind not in MESSAGES or op.peer is None or op.forward:
            return True
        target = op.peer if op.kind == "send" else op.stage
        return sources.get(op.part, plan.stages[target].last) >= prefix

    left = [replace(queue, ops=tuple(filter(is_needed, queue.ops))) for queue in schedule.queues]
    queues: tuple[QueueOps, ...] = tuple(queue for queue in left if queue.ops)
    order = tuple(tuple(filter(is_needed, line)) for line in schedule.message_order)
    return replace(schedule, queues=queues, message_order=order)
