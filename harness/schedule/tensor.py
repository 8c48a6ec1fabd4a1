"""Tensor parallelism: the devices of a stage do the same task, each on its shards, and talk while they do so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from harness.op import Op
from harness.plan import Plan, Traffic
from harness.schedule import LaneOps, Schedule

PHASES = {"F": ("forward",), "B": ("recompute", "backward")}
"""Of which tasks the traffic is. What is computed again is so inside the backward pass, layer by layer."""


def told(stage: int, traffic: Traffic, micro_batch: int | None) -> Op:
    """A block for all that a stage's devices send each other in one phase by one algorithm."""
    part = f"{traffic.algorithm}@{traffic.phase}/{stage}"
    return Op(stage, "collective", micro_batch, part, bytes=traffic.bytes, seconds=traffic.seconds)


def with_traffic(schedule: Schedule, plan: Plan) -> Schedule:
    """The schedule, each of whose devices is now `plan.mesh.tensor` devices.

    stage 0   0F0 |all_gather reduce_scatter| 0B0 |all_gather reduce_scatter| |all_reduce| 0step
                   @forward                        @backward                   @weights

    What is sent inside a pass, product by product, is one block for each algorithm behind it; the sums of the weights'
    gradients, which run beside the last backward pass, are before the step. So a prediction is too slow by what really
    overlaps. Of a plan without traffic it is as it was.
    """
    if not plan.traffic:
        return replace(schedule, tensor=plan.mesh.tensor)
    lanes = [replace(lane, ops=tuple(_with(lane, plan.traffic))) for lane in schedule.lanes]
    return replace(schedule, lanes=tuple(lanes), tensor=plan.mesh.tensor)


def _with(lane: LaneOps, traffic: Sequence[Sequence[Traffic]]) -> Iterator[Op]:
    sums = {op.stage: op for op in reversed(lane.ops) if op.kind in ("collective", "step")}  # the first of each stage
    for op in lane.ops:
        if sums.get(op.stage) is op:
            yield from _told(op, traffic[op.stage], ("weights",))
        yield op
        yield from _told(op, traffic[op.stage], PHASES.get(op.kind, ()))


def _told(op: Op, traffic: Sequence[Traffic], phases: Sequence[str]) -> Iterator[Op]:
    return (told(op.stage, one, op.micro_batch) for phase in phases for one in traffic if one.phase == phase)
