"""Interleaved 1F1B: each device holds several chunks of the model (Megatron-LM, section 2.2.2)."""

from __future__ import annotations

from collections.abc import Sequence

from harness.core.op import Op
from harness.core.problem import Problem, ProblemError
from harness.schedule import Schedule, collect_queues
from harness.schedule.builders.one_f_one_b import alternate, backward, one_f_one_b
from harness.schedule.transfers import Transfer, with_messages


def interleaved(
    micro_batches: int, devices: int, chunks: int, transfers: Sequence[Transfer], recompute: str = "never"
) -> Schedule:
    """Returns interleaved 1F1B: chunk c of device d is stage c * devices + d.

    Micro-batches go round the devices `chunks` times.


    m=4, 2 devices, 2 chunks   (in time: python -m harness.schedule interleaved stages=4 chunks=2 micro_batches=4)
    device 0   0F0 0F1 2F0 2F1 | 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 | 2B2 2B3 0B2 0B3
    device 1   1F0 1F1 | 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 | 1B2 1B3

    The pipeline fills and drains in chunks, so the bubble is 1/chunks of that of 1F1B, with `chunks` times as many
    messages. One chunk is 1F1B. `transfers` connect the stages. Raises ProblemError where `micro_batches` is not a
    multiple of `devices`.
    """
    n, v, m = devices, chunks, micro_batches
    if v == 1:
        return one_f_one_b(m, range(n), transfers, recompute)
    check_full_rounds(m, n)
    orders = []
    for d in range(n):
        rounds = [(c * n + d, i) for c, i in turns(m, n, range(v))]
        back = [(c * n + d, i) for c, i in turns(m, n, range(v - 1, -1, -1))]
        forwards = [Op(stage, "F", i) for stage, i in rounds]
        backwards = [backward(stage, i, m, recompute) for stage, i in back]
        orders.append(alternate(forwards, backwards, 2 * (n - d - 1) + (v - 1) * n))
    placed = [stage % n for stage in range(n * v)]
    return Schedule(collect_queues(with_messages(orders, placed, transfers)), tuple(placed))


def looped_bfs(micro_batches: int, devices: int, chunks: int, transfers: Sequence[Transfer]) -> Schedule:
    """Returns the breadth-first order: all micro-batches through one chunk of a device, then through the next one.

    m=3, 2 devices, 2 chunks
    time      0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17  18  19  20
    device 0  0F0 0F1 0F2 2F0 2F1 2F2 .   .   .   2B2---- 2B1---- 2B0---- 0B2---- 0B1---- 0B0----
    device 1  .   1F0 1F1 1F2 3F0 3F1 3F2 3B2---- 3B1---- 3B0---- 1B2---- 1B1---- 1B0---- .   .

    Lamy-Poirier, Breadth-First Pipeline Parallelism, arXiv 2211.05953, section 4. A device keeps all micro-batches, and
    is idle for (n - 1)(F + B) of one chunk, as in interleaved 1F1B; sharded weights are gathered once for each chunk
    and pass. The last micro-batch is the first one on the way back, as in torch.distributed.pipelining
    (`ScheduleLoopedBFS`). Chunk c of device d is stage c * devices + d.
    """
    orders = []
    for d in range(devices):
        own = [c * devices + d for c in range(chunks)]
        forwards = [Op(stage, "F", i) for stage in own for i in range(micro_batches)]
        orders.append(forwards + [Op(stage, "B", i) for stage in reversed(own) for i in reversed(range(micro_batches))])
    placed = [stage % devices for stage in range(devices * chunks)]
    return Schedule(collect_queues(with_messages(orders, placed, transfers)), tuple(placed))


def check_full_rounds(micro_batches: int, devices: int) -> None:
    """Raises ProblemError where micro-batches do not go round the devices in full rounds."""
    if problem := no_full_rounds(micro_batches, devices):
        raise ProblemError(problem)


def no_full_rounds(micro_batches: int, devices: int) -> Problem | None:
    """Returns the problem of micro-batches that are no multiple of the devices."""
    if not micro_batches % devices:
        return None
    rounds = micro_batches // devices
    near = tuple({"batch.micro_batches": k * devices} for k in (rounds, rounds + 1) if k)
    message = f"is no multiple of the {devices} devices of the pipeline"
    return Problem("batch.micro_batches", micro_batches, message, near)


def turns(micro_batches: int, devices: int, chunks: Sequence[int]) -> list[tuple[int, int]]:
    """Returns (chunk, micro-batch) in a device's order: as many micro-batches as devices through each chunk in turn.

    m=4, 2 devices   (0, 0) (0, 1) (1, 0) (1, 1)   (0, 2) (0, 3) (1, 2) (1, 3)
    """
    groups = range(0, micro_batches, devices)
    return [(chunk, i) for first in groups for chunk in chunks for i in range(first, first + devices)]
