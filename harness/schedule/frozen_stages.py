"""What a schedule leaves out of a frozen prefix: layers before all that are trained.

    stage            0 (frozen)     1 (its first layers are frozen)     2
    backward pass    B, empty       B, down to its first trained layer  B
    messages back              <- none                       <- gradients

A backward task without work stays where it is: orders of tasks are fixed data, and files have it.

Where messages decide what runs, the first stage does not wait for such tasks, so the first stage with a backward pass
keeps the limit (here 2): at most so many of its micro-batches have not come back.

    F0 F1 B0 F2 B1 F3 B2 B3
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from harness.core.model_profile import ModelProfile
from harness.core.op import Op
from harness.core.plan import Plan
from harness.schedule import QueueOps, Schedule
from harness.schedule.builders.one_f_one_b import alternate
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
    device = plan.stages[plan.stage_of(prefix)].device
    queues = tuple(
        _limited(queue, schedule.limit) if schedule.limit is not None and queue.device == device else queue
        for queue in left
        if queue.ops
    )
    order = tuple(tuple(filter(is_needed, line)) for line in schedule.message_order)
    return replace(schedule, queues=queues, message_order=order)


def _limited(queue: QueueOps, limit: int) -> QueueOps:
    """Returns a compute queue that picks by a rule in an order that has at most `limit` micro-batches in flight."""
    if queue.name != "compute" or queue.rule == "in_order":
        return queue
    forwards = [op for op in queue.ops if op.kind == "F"]
    backwards: dict[int | None, list[Op]] = {op.micro_batch: [] for op in forwards}
    for op in queue.ops:
        if op.kind in ("R", "B"):
            backwards[op.micro_batch].append(op)
    rest = [op for op in queue.ops if op.kind not in ("F", "R", "B")]
    return replace(queue, ops=(*alternate(forwards, [*backwards.values()], limit - 1), *rest), rule="in_order")
