"""1F1B with a flush at the end of each step (PipeDream-Flush; Megatron-LM, section 2.2.1)."""

from __future__ import annotations

from collections.abc import Sequence

from harness.core.op import Op
from harness.core.problem import Problem, ProblemError
from harness.schedule import Schedule, collect_queues
from harness.schedule.builders.gpipe import recomputed
from harness.schedule.transfers import Transfer, with_messages


def one_f_one_b(
    micro_batches: int, devices: Sequence[int], transfers: Sequence[Transfer], recompute: str = "never"
) -> Schedule:
    """Returns 1F1B: stage j of n runs n - j - 1 forwards (warm-up), then one forward and one backward in turn.

    The remaining backwards follow (cool-down).

    m=4 n=3
    time      0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17
    device 0  0F0 0F1 0F2 .   .   .   .   0B0---- 0F3 0B1---- .   0B2---- .   0B3----
    device 1  .   1F0 1F1 .   .   1B0---- 1F2 1B1---- 1F3 1B2---- .   1B3---- .   .
    device 2  .   .   2F0 2B0---- 2F1 2B1---- 2F2 2B2---- 2F3 2B3---- .   .   .   .

    So stage j keeps the activations of n - j micro-batches at most. `devices[j]` is the device of stage j; a
    recomputation runs right before its backward task. Raises ProblemError where two stages are on one device.
    """
    n = len(devices)
    check_one_stage_each(devices, "1F1B", "interleaved stages")
    orders = []
    for j in range(n):
        forwards = [Op(j, "F", i) for i in range(micro_batches)]
        backwards = [backward(j, i, micro_batches, recompute) for i in range(micro_batches)]
        orders.append(alternate(forwards, backwards, n - j - 1))
    return Schedule(collect_queues(with_messages(orders, devices, transfers)), tuple(devices))


def eager_1f1b(
    micro_batches: int, devices: Sequence[int], transfers: Sequence[Transfer], recompute: str = "never"
) -> Schedule:
    """Returns 1F1B with twice as many forward passes before the first backward pass, so that messages hide.

    m=4, 3 stages
    time      0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17
    device 0  0F0 0F1 0F2 0F3 .   .   .   0B0---- .   0B1---- .   0B2---- .   0B3----
    device 1  .   1F0 1F1 1F2 .   1B0---- 1F3 1B1---- .   1B2---- .   1B3---- .   .
    device 2  .   .   2F0 2B0---- 2F1 2B1---- 2F2 2B2---- 2F3 2B3---- .   .   .   .

    Zhuang et al., On Optimizing the Communication of Model Parallelism, arXiv 2211.05322, section 4. Stage j of n keeps
    2(n - j) - 1 micro-batches; the bubble is that of 1F1B, but the message that a task waits for is under way while the
    task before it runs. `devices[j]` is the device of stage j.
    """
    n = len(devices)
    check_one_stage_each(devices, "eager 1F1B", "interleaved stages")
    orders = []
    for j in range(n):
        forwards = [Op(j, "F", i) for i in range(micro_batches)]
        backwards = [backward(j, i, micro_batches, recompute) for i in range(micro_batches)]
        orders.append(alternate(forwards, backwards, 2 * (n - j - 1)))
    return Schedule(collect_queues(with_messages(orders, devices, transfers)), tuple(devices))


def backward(stage: int, i: int, micro_batches: int, recompute: str) -> list[Op]:
    """Returns the backward task of micro-batch i, after its recomputation where there is one."""
    task = Op(stage, "B", i)
    return [Op(stage, "R", i), task] if recomputed(i, micro_batches, recompute) else [task]


def alternate(forwards: Sequence[Op], backwards: Sequence[Sequence[Op]], warm_up: int) -> list[Op]:
    """Orders `warm_up` forwards, then one forward and one backward in turn, then the remaining backwards."""
    order = list(forwards[:warm_up])
    for k, tasks in enumerate(backwards):
        order += forwards[warm_up + k : warm_up + k + 1]
        order += tasks
    return order


def check_one_stage_each(devices: Sequence[int], who: str, otherwise: str = "") -> None:
    """Raises ProblemError where two stages are on one device; `devices[j]` is that of stage j."""
    for j, device in enumerate(devices):
        first = devices.index(device)
        if first != j:
            message = f"are both on device {device}, {who} needs one device for each stage"
            hint = f"{len(devices)} devices" + (f", or {otherwise}" if otherwise else "")
            raise ProblemError(Problem(f"stages {first} and {j}", None, message, hint=hint))
