"""Analytic estimate of a plan's peak memory: training state, plus the activations of the micro-batches in flight.

Where a schedule fixes its order this is never more than what a simulated step needs. Where a rule picks, a stage is
taken to have as many micro-batches in flight as in 1F1B, which it has where stages take equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Mesh, Plan
from harness.planning.draft import Layout
from harness.schedule import QueueOps, Schedule
from harness.simulator.memory_timeline import working_bytes

BUFFERS = {"passing": 0, "posted": 1, "copied": 1}
"""Buffers for good of each message between stages; "kept": one for each micro-batch."""


@dataclass(frozen=True)
class Held:
    """Micro-batches that a stage has in flight when its first backward task begins, and at most at a later one."""

    first: int
    later: int

    def of(self, micro_batches: int, counted: int) -> int:
        """Return the bytes of so many micro-batches, if these were counted with `counted` of them: all, where all are
        kept."""
        most = max(self.first, self.later)
        return micro_batches if most == counted else min(most, micro_batches)


def counted(schedule: Schedule, plan: Plan) -> list[Held]:
    """Return the counted memory of each stage of a schedule."""
    queues = {queue.device: queue for queue in schedule.queues if queue.name == "compute"}
    return [_held(queues[stage.device], number, schedule, plan) for number, stage in enumerate(plan.stages)]


def _held(queue: QueueOps, stage: int, schedule: Schedule, plan: Plan) -> Held:
    m = plan.micro_batches
    if queue.rule != "in_order":
        most = min(m, schedule.limit or m, len(plan.stages) - stage)
        return Held(most, most if m > most else most - 1)
    now, found = 0, []
    for op in queue.ops:
        if op.stage == stage and op.kind == "F":
            now += 1
        elif op.stage == stage and op.kind == "B":
            found.append(now)
            now -= 1
    return Held(found[0], max(found[1:], default=0))


def share(memory: MemoryModel, profile: ModelProfile, mesh: Mesh) -> int:
    """Bytes of the model's state on the devices of a replica, on average: no plan needs less on all of them."""
    return memory.state_bytes(profile, 0, len(profile.layers) - 1) // (mesh.pipeline * mesh.tensor)


def needed(layout: Layout, held: Sequence[Held], count: int) -> list[int]:
    """Bytes of each of `plan.devices`; `held` was counted with `count` micro-batches."""
    plan, profile, memory = layout.plan, layout.profile, layout.memory
    more = plan.micro_batches - count
    found = []
    for device in plan.devices:
        own = [number for number, stage in enumerate(plan.stages) if stage.device == device]
        layers = [layer for number in own for layer in range(plan.stages[number].first, plan.stages[number].last + 1)]
        there = sum(memory.state_parts(profile, layers).values())
        if memory.activations == "saved":
            there += plan.micro_batches * profile.input_bytes if 0 in own else 0
            there += BUFFERS.get(memory.messages, plan.micro_batches) * sum(
                _boundaries(layout, number) for number in own
            )
        kept = max(_kept(layout, number, held[number], more if held[number].first == count else 0) for number in own)
        rebuilt = round(memory.rebuilt * profile.trained_bytes_of(layers))
        found.append(there + max(kept, rebuilt))
    return found


def _boundaries(layout: Layout, number: int) -> int:
    """Bytes of what enters a stage from the one before, and of the gradient of what it sends to the next."""
    stage, last = layout.plan.stages[number], len(layout.plan.stages) - 1
    entering = layout.profile.boundary_bytes(stage.first) if number else 0
    back = number < last and stage.last >= layout.profile.frozen_prefix
    return entering + (layout.profile.boundary_bytes(stage.last + 1) if back else 0)


def _kept(layout: Layout, number: int, held: Held, more: int) -> int:
    """Return the most bytes that a stage's tasks keep, during a backward task; all `more` micro-batches are kept,
    too."""
    plan, profile, memory = layout.plan, layout.profile, layout.memory
    first, last = plan.stages[number].first, plan.stages[number].last
    if last < profile.frozen_prefix:
        return 0  # nothing stays, and there is no backward pass
    task = memory.task_bytes(profile, first, last)
    if memory.activations != "saved":
        return max(held.first, held.later) * task + more * task
    checkpoint = memory.checkpoint_bytes(profile, first, last)
    inside = task - min(
        profile.boundary_bytes(first), profile.layers[first].saved_bytes
    )  # the input is counted already
    each, once = (task, 0) if plan.recompute == "never" else (checkpoint, inside)
    if number == 0 or memory.messages == "kept":  # the input is in the mini-batch, or in a permanent buffer
        each = inside if plan.recompute == "never" else checkpoint - profile.boundary_bytes(first)
    if number == len(plan.stages) - 1:
        each += profile.layers[last].output_bytes
    moments = [(held.first, 0.0), (held.later, min(1.0, memory.gradients))]
    return max(
        (flying + more) * each + once + working_bytes(profile, first, last, accumulated)
        for flying, accumulated in moments
        if flying
    )
