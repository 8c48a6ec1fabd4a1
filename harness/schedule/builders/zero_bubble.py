"""Zero bubble: the backward pass in two halves, one of which fills the bubble. ZB-H1, ZB-H2, interleaved, ZB-V.

Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 6; Pipeline Parallelism with Controllable Memory,
arXiv 2405.15362.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import cast

from harness.core.op import Kind, Op
from harness.schedule import Schedule, collect_queues
from harness.schedule.builders.interleaved import check_full_rounds, turns
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


def zb_h1(micro_batches: int, devices: int, transfers: Sequence[Transfer]) -> Schedule:
    """Returns ZB-H1: 1F1B whose W fill a third of its bubble, in the memory of 1F1B (section 2.3.1).

    m=4, 3 devices
    time      0   1   2   3   4   5   6   7   8   9   10  11  12  13
    device 0  0F0 0F1 0F2 .   .   0B0 0W0 0F3 0B1 0W1 0B2 0W2 0B3 0W3
    device 1  .   1F0 1F1 .   1B0 1F2 1B1 1W0 1F3 1B2 1W1 1B3 1W2 1W3
    device 2  .   .   2F0 2B0 2F1 2B1 2F2 2B2 2W0 2F3 2B3 2W1 2W2 2W3

    Device r of n delays its W by r micro-batches: it keeps n - r micro-batches between F and B, as in 1F1B, and r
    between B and W. It is idle for (n - 1)(F + B - W) in a step, 1F1B for (n - 1)(F + B + W).
    """
    return _delayed(micro_batches, devices, transfers, in_flight=1)


def zb_h2(micro_batches: int, devices: int, transfers: Sequence[Transfer]) -> Schedule:
    """Returns ZB-H2: more forward passes before the first backward pass leave no bubble inside (section 2.3.2).

    m=4, 2 devices
    time      0   1   2   3   4   5   6   7   8   9   10  11  12
    device 0  0F0 0F1 0F2 0B0 0W0 0F3 0B1 0W1 0B2 0W2 0B3 0W3 .
    device 1  .   1F0 1B0 1F1 1B1 1F2 1B2 1W0 1F3 1B3 1W1 1W2 1W3

    Device r of n keeps 2(n - r) - 1 micro-batches between F and B, and 2r between B and W: 2n - 1 in all. It is idle
    for (n - 1)(F + B - 2W) from its first task to its last one, which is nothing if these take equally long. Devices
    begin and end one after the other: the paper lets the optimizers of two steps overlap, here a step ends with the
    last device. Needs 2n - 1 micro-batches to be full.
    """
    return _delayed(micro_batches, devices, transfers, in_flight=2)


def _delayed(micro_batches: int, devices: int, transfers: Sequence[Transfer], in_flight: int) -> Schedule:
    orders = []
    for r in range(devices):
        tasks = [[Op(r, cast(Kind, kind), i) for i in range(micro_batches)] for kind in "FBW"]
        orders.append(_with_late_weights(tasks, in_flight * (devices - 1 - r), in_flight * r))
    placed = range(devices)
    return Schedule(collect_queues(with_messages(orders, placed, transfers)), tuple(placed))


def interleaved_zb(micro_batches: int, devices: int, chunks: int, transfers: Sequence[Transfer]) -> Schedule:
    """Returns interleaved 1F1B with late W, `ScheduleInterleavedZeroBubble` of torch.distributed.pipelining.

    m=4, 2 devices, 2 chunks
    time      0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17  18  19  20  21  22  23  24
    device 0  0F0 0F1 2F0 2F1 .   2B0 2W0 0F2 2B1 2W1 0F3 0B0 0W0 2F2 0B1 0W1 2F3 2B2 2W2 2B3 2W3 0B2 0W2 0B3 0W3
    device 1  .   1F0 1F1 3F0 3B0 3F1 3B1 3W0 1F2 1B0 3W1 1F3 1B1 1W0 3F2 3B2 1W1 3F3 3B3 3W2 1B2 3W3 1B3 1W2 1W3

    Chunk c of device d is stage c * devices + d. Device d delays its W by d tasks; one chunk is ZB-H1. `transfers`
    connect the stages. Raises ProblemError where `micro_batches` is not a multiple of `devices`.
    """
    check_full_rounds(micro_batches, devices)
    orders = []
    for d in range(devices):
        forward = turns(micro_batches, devices, range(chunks))
        back = turns(micro_batches, devices, range(chunks - 1, -1, -1))
        tasks = [[Op(c * devices + d, cast(Kind, kind), i) for c, i in places] for kind, places in
                 (("F", forward), ("B", back), ("W", back))]  # fmt: skip
        orders.append(_with_late_weights(tasks, (chunks - 1) * devices + devices - 1 - d, d))
    placed = [stage % devices for stage in range(devices * chunks)]
    return Schedule(collect_queues(with_messages(orders, placed, transfers)), tuple(placed))


def _with_late_weights(tasks: Sequence[Sequence[Op]], warm_up: int, delay: int) -> list[Op]:
    """Orders tasks (F, B, W): `warm_up` forward ones, then one of each kind in turn, W `delay` turns after its B."""
    forwards, backwards, weights = tasks
    order = list(forwards[:warm_up])
    for k, task in enumerate(backwards):
        order += [*forwards[warm_up + k : warm_up + k + 1], task]
        order += weights[k - delay : k - delay + 1] if k >= delay else []
    return [*order, *weights[max(0, len(backwards) - delay) :]]
