"""One device, micro-batch after micro-batch: gradient accumulation."""

from __future__ import annotations

from harness.op import Op
from harness.schedule import Schedule, lanes_of
from harness.schedule.gpipe import recomputed


def single(micro_batches: int, recompute: str = "never") -> Schedule:
    """0F0 0B0 0F1 0B1 ... 0step, with 0Ri before 0Bi where micro-batch i is recomputed."""
    ops = []
    for i in range(micro_batches):
        ops.append(Op(0, "F", i))
        if recomputed(i, micro_batches, recompute):
            ops.append(Op(0, "R", i))
        ops.append(Op(0, "B", i))
    ops.append(Op(0, "step"))
    return Schedule(lanes_of(((0, "compute"), op) for op in ops), devices=(0,), loss="each")
