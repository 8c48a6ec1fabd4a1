"""ZB-V: the backward pass in two halves, one of which fills the bubble.

Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 6; Pipeline Parallelism with Controllable Memory,
arXiv 2405.15362.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import cast

from harness.core.op import Kind, Op
from harness.schedule import Schedule, collect_queues
from harness.schedule.transfers import Transfer, with_messages


def zbv(micro_batches: int, devices: int, transfers: Sequence[Transfer]) -> Schedule:
    """Returns ZB-V: device r of n holds the stages r and 2n - 1 - r, micro-batches go down the devices and up again.

    m=3, 2 devices; B is for the gradient of a stage's input, W for those of its weights
    time      0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17  18
    device 0  0F0 0F1 0F2 3F0 3B0 3W0 3F1 3B1 3W1 0B0 0W0 3F2 3B2 3W2 0B1 0W1 0B2 0W2 .
    device 1  .   1F0 2F0 1F1 2F1 2B0 2W0 1F2 1B0 1W0 2F2 2B1 2W1 1B1 2B2 1B2 1W1 2W2 1W2

    The first and the last stage share a device, so a micro-batch turns round there without a message. The stage before
    waits for B only. Only the optimizer waits for W, so W is delayed to fill the time in which a device would be idle.
    With 2n - 1 micro-batches or more, if F, B and W take equally long, a device is idle for n - 1 of them in all: until
    the first micro-batch arrives, and after the last one has left. It keeps what 2n forward tasks saved at most, as
    much as the first device of 1F1B.

    The order is that of torch.distributed.pipelining (`ScheduleZBVZeroBubble`), which splits every backward pass, also
    where W follows its own B directly. `transfers` connect the 2n stages.
    """
    placed = [*range(devices), *reversed(range(devices))]
    orders = [_order(r, devices, micro_batches) for r in range(devices)]
    return Schedule(collect_queues(with_messages(orders, placed, transfers)), tuple(placed))


def _phrases(r: int, n: int, m: int) -> list[tuple[int, str]]:
    """Returns (repetitions, tasks) of device r, in order; a is its chunk on the way down, b the one on the way up.

    Each task takes the next micro-batch of its kind. Needs m >= 2n - 1.
    """
    return [
        (2 * (n - r) - 1, "Fa"),  # until the first micro-batch is back
        (r, "Fb Fa"),
        (n - r, "Fb Bb Wb"),
        (m - 2 * n + r + 1, "Fa Ba Wa Fb Bb Wb"),  # steady state: every kind of task in turn
        (n - r - 1, "Ba Wa Fb Bb Wb"),
        (r, "Ba Bb"),  # others wait for gradients: the weights come later
        (n - r, "Ba Wa"),
        (r, "Wb"),
        (r, "Wa"),
    ]


def _order(r: int, n: int, micro_batches: int) -> list[Op]:
    """Orders the tasks of device r. Fewer micro-batches than 2n - 1 run as the first ones of 2n - 1."""
    stages = {"a": r, "b": 2 * n - 1 - r}
    done: dict[str, int] = defaultdict(int)
    order = []
    for times, phrase in _phrases(r, n, max(micro_batches, 2 * n - 1)):
        for task in phrase.split() * times:
            if done[task] < micro_batches:
                order.append(Op(stages[task[1]], cast(Kind, task[0]), done[task]))
            done[task] += 1
    return order
