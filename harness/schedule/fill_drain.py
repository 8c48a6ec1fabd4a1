"""GPipe as torch.distributed.pipelining runs it: gradients come back in the order in which micro-batches went in."""

from __future__ import annotations

from collections.abc import Sequence

from harness.op import Op
from harness.schedule import Schedule, lanes_of
from harness.schedule.hops import Hop
from harness.schedule.messages import with_messages
from harness.schedule.one_f_one_b import backward


def fill_drain(micro_batches: int, devices: Sequence[int], hops: Sequence[Hop], recompute: str = "never") -> Schedule:
    """All forwards of a stage, then all its backwards, both from the first micro-batch to the last (`ScheduleGPipe`).

    m=3 n=3
    time      0   1   2   3   4   5   6   7   8   9   10  11  12  13  14
    device 0  0F0 0F1 0F2 .   .   .   .   .   .   0B0---- 0B1---- 0B2----
    device 1  .   1F0 1F1 1F2 .   .   .   1B0---- 1B1---- 1B2---- .   .
    device 2  .   .   2F0 2F1 2F2 2B0---- 2B1---- 2B2---- .   .   .   .

    `harness.schedule.gpipe`, torchgpipe's, goes backward from the last micro-batch to the first: the time is the same,
    but there the last stage can use at once what it has just computed. Every stage keeps all micro-batches.
    `devices[j]` is the device of stage j; a recomputation runs right before its backward task.
    """
    orders = []
    for j in range(len(devices)):
        order = [Op(j, "F", i) for i in range(micro_batches)]
        for i in range(micro_batches):
            order += backward(j, i, micro_batches, recompute)
        orders.append(order)
    return Schedule(lanes_of(with_messages(orders, devices, hops)), tuple(devices))
