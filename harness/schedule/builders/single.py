"""One device, micro-batch after micro-batch: gradient accumulation."""

from __future__ import annotations

from harness.core.op import Op
from harness.schedule import Schedule, collect_queues
from harness.schedule.builders.gpipe import recomputed


def single(micro_batches: int, recompute: str = "never") -> Schedule:
    """Runs 0F0 0B0 0F1 0B1 ... 0step, with 0Ri before 0Bi where micro-batch i is recomputed."""
    ops = []
    for i in range(micro_batches):
        ops.append(Op(0, "F", i))
        if recomputed(i, micro_batches, recompute):
            ops.append(Op(0, "R", i))
        ops.append(Op(0, "B", i))
    ops.append(Op(0, "step"))
    return Schedule(collect_queues(((0, "compute"), op) for op in ops), devices=(0,), loss="each")
