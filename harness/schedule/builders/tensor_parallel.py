"""Tensor parallelism: the devices of a stage run the same task, each on its shards, and communicate inside the task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from harness.core.op import Op
from harness.core.plan import Plan, Traffic
from harness.schedule import QueueOps, Schedule

PHASES = {"F": ("forward",), "B": ("recompute", "backward")}
"""The phases of traffic in each kind of task. Recomputation runs inside the backward pass, layer by layer."""


def traffic_op(stage: int, traffic: Traffic, micro_batch: int | None) -> Op:
    """Returns one op for all that a stage's devices send each other in one phase by one algorithm."""
    part = f"{traffic.algorithm}@{traffic.phase}/{stage}"
    return Op(stage, "collective", micro_batch, part, bytes=traffic.bytes, seconds=traffic.seconds)


def with_traffic(schedule: Schedule, plan: Plan) -> Schedule:
    """Replaces each device by `plan.mesh.tensor` devices (the tensor parallel size), with their traffic.

    stage 0   0F0 |all_gather reduce_scatter| 0B0 |all_gather reduce_scatter| |all_reduce| 0step
                   @forward                        @backward                   @weights

    What a pass sends, matmul by matmul, becomes one op for each algorithm after the pass. The reduction of the weights'
    gradients, which really overlaps with the last backward pass, comes before the step, so the predicted time is an
    upper bound. A plan without traffic adds no ops.
    """
    if not plan.traffic:
        return replace(schedule, tensor=plan.mesh.tensor)
    queues = [replace(queue, ops=tuple(_with(queue, plan.traffic))) for queue in schedule.queues]
    return replace(schedule, queues=tuple(queues), tensor=plan.mesh.tensor)


def _with(queue: QueueOps, traffic: Sequence[Sequence[Traffic]]) -> Iterator[Op]:
    first_collective = {
        op.stage: op for op in reversed(queue.ops) if op.kind in ("collective", "step")
    }  # of each stage
    for op in queue.ops:
        if first_collective.get(op.stage) is op:
            yield from _traffic_ops(op, traffic[op.stage], ("weights",))
        yield op
        yield from _traffic_ops(op, traffic[op.stage], PHASES.get(op.kind, ()))


def _traffic_ops(op: Op, traffic: Sequence[Traffic], phases: Sequence[str]) -> Iterator[Op]:
    return (
        traffic_op(op.stage, entry, op.micro_batch) for phase in phases for entry in traffic if entry.phase == phase
    )
