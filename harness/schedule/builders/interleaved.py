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
    if m % n:
        near = tuple({"batch.micro_batches": k * n} for k in (m // n, m // n + 1) if k)
        raise ProblemError(
            Problem("batch.micro_batches", m, f"is no multiple of the {n} devices of the pipeline", near)
        )
    orders = []
    for d in range(n):
        rounds = [(c * n + d, i) for c, i in turns(m, n, range(v))]
        back = [(c * n + d, i) for c, i in turns(m, n, range(v - 1, -1, -1))]
        forwards = [Op(stage, "F", i) for stage, i in rounds]
        backwards = [backward(stage, i, m, recompute) for stage, i in back]
        orders.append(alternate(forwards, backwards, 2 * (n - d - 1) + (v - 1) * n))
    placed = [stage % n for stage in range(n * v)]
    return Schedule(collect_queues(with_messages(orders, placed, transfers)), tuple(placed))


def turns(micro_batches: int, devices: int, chunks: Sequence[int]) -> list[tuple[int, int]]:
    """Returns (chunk, micro-batch) in a device's order: as many micro-batches as devices through each chunk in turn.

    m=4, 2 devices   (0, 0) (0, 1) (1, 0) (1, 1)   (0, 2) (0, 3) (1, 2) (1, 3)
    """
    groups = range(0, micro_batches, devices)
    return [(chunk, i) for first in groups for chunk in chunks for i in range(first, first + devices)]
