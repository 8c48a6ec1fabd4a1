"""GPipe as torch.distributed.pipelining runs it: gradients come back in the order in which micro-batches went in."""

from __future__ import annotations

from collections.abc import Sequence

from harness.core.op import Op
from harness.schedule import Schedule, collect_queues
from harness.schedule.builders.one_f_one_b import backward
from harness.schedule.transfers import Transfer, with_messages


def fill_drain(
    micro_batches: int, devices: Sequence[int], transfers: Sequence[Transfer], recompute: str = "never"
) -> Schedule:
    """Runs all forwards of a stage, then all backwards, each from the first micro-batch to the last (`ScheduleGPipe`).

    m=3 n=3
    time      0   1   2   3   4   5   6   7   8   9   10  11  12  13  14
    device 0  0F0 0F1 0F2 .   .   .   .   .   .   0B0---- 0B1---- 0B2----
    device 1  .   1F0 1F1 1F2 .   .   .   1B0---- 1B1---- 1B2---- .   .
    device 2  .   .   2F0 2F1 2F2 2B0---- 2B1---- 2B2---- .   .   .   .

    `harness.schedule.builders.gpipe`, torchgpipe's, goes backward from the last micro-batch to the first: the time is
    the same, but there the last stage can use at once what it has just computed. Every stage keeps all micro-batches.
    `devices[j]` is the device of stage j; a recomputation runs right before its backward task.
    """
    orders = []
    for j in range(len(devices)):
        order = [Op(j, "F", i) for i in range(micro_batches)]
        for i in range(micro_batches):
            order += backward(j, i, micro_batches, recompute)
        orders.append(order)
    return Schedule(collect_queues(with_messages(orders, devices, transfers)), tuple(devices))
