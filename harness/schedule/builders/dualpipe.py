"""DualPipeV: forward and backward passes in pairs, which hide each other's communication.

DeepSeek-V3 technical report, arXiv 2412.19437, section 3.2.1, and github.com/deepseek-ai/DualPipe, which names the V.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from harness.core.op import Op
from harness.core.problem import Problem, ProblemError
from harness.schedule import Schedule, collect_queues
from harness.schedule.transfers import Transfer, with_messages


def dualpipe_v(micro_batches: int, devices: int, transfers: Sequence[Transfer]) -> Schedule:
    """Returns DualPipeV: device r of n holds the stages r and 2n - 1 - r, as in ZB-V.

    m=4, 2 devices; a backward pass is whole, but where the pipeline fills and drains
    time      0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17  18  19  20  21  22  23  24
    device 0  0F0 0F1 0F2 3F0 3B0 3W0 3F1 0F3 3B1---- 3F2 0B0---- 3B2---- 3F3 .   0B1---- 3B3---- 0B2 0W2 0B3 0W3
    device 1  .   1F0 2F0 1F1 2F1 1F2 2B0---- 2F2 1B0---- 1F3 2B1---- 2F3 1B1---- 2B2---- 1B2---- 2B3 1B3 2W3 1W3

    In the steady state each device runs a forward pass of one chunk and a whole backward pass of the other in turn.
    DeepSeek overlaps the two of such a pair (expert parallelism sends messages inside a pass); here one follows the
    other. The order is that of torch.distributed.pipelining (`ScheduleDualPipeV`). `transfers` connect the 2n stages.
    Raises ProblemError for fewer micro-batches than stages.
    """
    if problem := too_few(micro_batches, devices):
        raise ProblemError(problem)
    placed = [*range(devices), *reversed(range(devices))]
    orders = [_order(r, devices, micro_batches) for r in range(devices)]
    return Schedule(collect_queues(with_messages(orders, placed, transfers)), tuple(placed))


def too_few(micro_batches: int, devices: int) -> Problem | None:
    """Returns the problem of fewer micro-batches than stages."""
    if micro_batches >= 2 * devices:
        return None
    message = f"is less than the {2 * devices} stages, which DualPipeV needs"
    return Problem("batch.micro_batches", micro_batches, message, ({"batch.micro_batches": 2 * devices},))


def _phrases(r: int, n: int, m: int) -> list[tuple[int, str]]:
    """Returns (repetitions, tasks) of device r, in order; a is its chunk on the way down, b the one on the way up.

    B is a whole backward pass, I the half for the inputs, W the oldest one for the weights that is left.
    """
    backward = ["Bb", "Ba"] * (r + 1)
    halves = [task.replace("B", "I") for task in backward[r + 1 :]]
    return [
        (2 * (n - r - 1), "Fa"),
        (r + 1, "Fa Fb"),
        (n - r - 1, "Ib W Fb"),
        (m - 2 * n + r + 1, "Fa Bb Fb Ba"),  # steady state: two pairs
        (n - r - 1, "Bb Fb Ba"),
        (1, " ".join([*backward[: r + 1], *halves])),
        (n - r - 1, "W Ia"),
        (r + 1, "W"),
    ]


def _order(r: int, n: int, micro_batches: int) -> list[Op]:
    stages = {"a": r, "b": 2 * n - 1 - r}
    forward: dict[str, int] = defaultdict(int)
    backward: dict[str, int] = defaultdict(int)
    late: deque[Op] = deque()
    order = []
    for times, phrase in _phrases(r, n, micro_batches):
        for task in phrase.split() * times:
            if task == "W":
                order.append(late.popleft())
                continue
            kind, chunk = task[0], task[1]
            done = forward if kind == "F" else backward
            order.append(Op(stages[chunk], "F" if kind == "F" else "B", done[chunk]))
            if kind == "I":
                late.append(Op(stages[chunk], "W", done[chunk]))
            done[chunk] += 1
    return order
