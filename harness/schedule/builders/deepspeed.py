"""DeepSpeed's pipeline: 1F1B whose sends and receives block (deepspeed.runtime.pipe, version 0.19)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from harness.core.op import Op
from harness.core.problem import Problem, ProblemError
from harness.schedule import Schedule, collect_queues
from harness.schedule.builders.data_parallel import Reduction, over_replicas
from harness.schedule.builders.one_f_one_b import backward, check_one_stage_each
from harness.schedule.tied_weight_ops import Tie
from harness.schedule.transfers import Transfer


def deepspeed(
    micro_batches: int,
    devices: Sequence[int],
    transfers: Sequence[Transfer],
    recompute: str = "never",
    ties: Sequence[Tie] = (),
    replicas: int = 1,
    parameter_bytes: Sequence[int] = (),
    zero: Literal[0, 1] = 0,
    reduction: Reduction = "reduce_scatter",
) -> Schedule:
    """Returns DeepSpeed's 1F1B: stage j runs F of micro-batch i in step 2i + j, B in step 2i + 2n - 1 - j.

    m=3 n=3   what a step has made is sent when the next one begins: > activations, < gradients
    step      0    1    2    3    4    5    6    7    8    9
    stage 0   0F0       0F1       0F2  0B0       0B1       0B2
                   >         >         <>        <         <
    stage 1        1F0       1F1  1B0  1F2  1B1       1B2
                        >         <>        <>        <
    stage 2             2F0  2B0  2F1  2B1  2F2  2B2

    A stage runs its tasks in the order of 1F1B. Sends and receives are ops of the compute queue between them, and a
    send and its receive run as one (`rendezvous`): a late stage delays its neighbours, and no message is in flight
    while one of its ends computes. Of two messages between the same stages the gradient goes first. The clock only
    explains the order, which is that of `TrainSchedule`.

    `transfers` connect neighbouring stages, one message for each tensor. DeepSpeed sends to no other stage, so skips
    travel through every stage in between (`plan_transfers(plan, profile, portals=False)`). A recomputation runs right
    before its backward task.

    The step ends as DeepSpeed's does, on every stage: all-reduce over tied copies, all-reduce over the `replicas` (of
    `parameter_bytes[j]` trained bytes on stage j), the optimizer. With `zero=1`, where the optimizer state is sharded,
    `reduction` replaces the all-reduce over replicas (see `harness.schedule.builders.data_parallel.data_parallel`),
    and an all-gather of the weights follows the optimizer.

    The schedule leaves out the shapes that are sent before the first message of a run, and the few numbers of the loss
    and of the gradient's norm. Raises ProblemError for two stages on one device, transfers that skip a stage, and
    replicas without the bytes of each stage.
    """
    _check(devices, transfers, replicas, parameter_bytes)
    placed = []
    for j, device in enumerate(devices):
        ops = list(_steps(j, len(devices), micro_batches, transfers, recompute))
        ops += [Op(j, "collective", None, tie.part, bytes=tie.bytes) for tie in ties if j in tie.stages]
        if replicas > 1:
            ops.append(over_replicas(j, reduction if zero else "all_reduce", parameter_bytes[j]))
        ops.append(Op(j, "step"))
        if replicas > 1 and zero:
            ops.append(over_replicas(j, "all_gather", parameter_bytes[j]))
        placed += [((device, "compute"), op) for op in ops]
    return Schedule(collect_queues(placed), tuple(devices), replicas=replicas, rendezvous=True)


def _check(
    devices: Sequence[int], transfers: Sequence[Transfer], replicas: int, parameter_bytes: Sequence[int]
) -> None:
    n = len(devices)
    check_one_stage_each(devices, "DeepSpeed")
    for transfer in transfers:
        if transfer.target != transfer.source + 1:
            message = (
                f"goes from stage {transfer.source} to stage {transfer.target}, DeepSpeed sends to the next one only"
            )
            hint = "a transfer to each stage in between (portals=False)"
            raise ProblemError(Problem(f"skip {transfer.part}", None, message, hint=hint))
    if replicas > 1 and len(parameter_bytes) != n:
        message = f"are those of {len(parameter_bytes)} stages, the {replicas} replicas have {n} stages"
        raise ProblemError(Problem("parameter_bytes", None, message, hint=f"{n} numbers"))


def _steps(j: int, n: int, micro_batches: int, transfers: Sequence[Transfer], recompute: str) -> Iterator[Op]:
    """Yields tasks and messages of stage j, step by step: forward where step and stage are both even or both odd.

    A forward step first exchanges messages with the previous stage, a backward step with the following one:
    forward    send the gradient of the step before, receive the activation, F
    backward   receive the gradient, send the activation of the step before, B
    """
    previous = [t for t in transfers if t.target == j]
    following = [t for t in transfers if t.source == j]
    micro_batch_range = range(micro_batches)
    for step in range(2 * (micro_batches + n - 1)):
        forward, back = (step - j) // 2, (step + j + 1) // 2 - n  # rounded down: the step itself, or the one before
        if (step - j) % 2 == 0:
            if back in micro_batch_range:
                yield from (Op(j, "send", back, t.part, t.source, t.bytes) for t in previous)
            if forward in micro_batch_range:
                yield from (Op(j, "recv", forward, t.part, t.source, t.bytes) for t in previous)
                yield Op(j, "F", forward)
        else:
            if back in micro_batch_range:
                yield from (Op(j, "recv", back, t.part, t.target, t.bytes) for t in following)
            if forward in micro_batch_range:
                yield from (Op(j, "send", forward, t.part, t.target, t.bytes) for t in following)
            if back in micro_batch_range:
                yield from backward(j, back, micro_batches, recompute)
