"""DeepSpeed's pipeline: 1F1B whose sends and receives block (deepspeed.runtime.pipe, version 0.19)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from harness.op import Op
from harness.schedule import Schedule, lanes_of
from harness.schedule.hops import Hop
from harness.schedule.one_f_one_b import backward
from harness.schedule.ties import Tie
from harness.schedule.zero import Reduction, over_replicas


def deepspeed(
    micro_batches: int,
    devices: Sequence[int],
    hops: Sequence[Hop],
    recompute: str = "never",
    ties: Sequence[Tie] = (),
    replicas: int = 1,
    parameter_bytes: Sequence[int] = (),
    zero: Literal[0, 1] = 0,
    reduction: Reduction = "reduce_scatter",
) -> Schedule:
    """Stage j runs F of micro-batch i in step 2i + j of a common clock, B in step 2i + 2n - 1 - j.

    m=3 n=3   what a step has made is sent when the next one begins: > activations, < gradients
    step      0    1    2    3    4    5    6    7    8    9
    stage 0   0F0       0F1       0F2  0B0       0B1       0B2
                   >         >         <>        <         <
    stage 1        1F0       1F1  1B0  1F2  1B1       1B2
                        >         <>        <>        <
    stage 2             2F0  2B0  2F1  2B1  2F2  2B2

    The tasks of a stage come in the order of 1F1B. Sends and receives stand between them in the compute queue, and a
    send and its receive are one (`rendezvous`): a stage that is late holds up its neighbours, and no message is under
    way while one of its ends computes. Of two messages between the same stages the gradient is first. There is no
    clock in reality: only the order counts. It is that of `TrainSchedule`.

    `hops` are those between neighbours, one message for each tensor: DeepSpeed sends to no others, so skips travel
    through every stage in between (`plan_hops(plan, profile, portals=False)`). A recomputation runs right before its
    backward task.

    The step ends as DeepSpeed's does, on every stage: sums over tied copies, sums over the `replicas`
    (`parameter_bytes[j]` are those of stage j), the optimizer. With `zero=1`, where the optimizer lies in shards, the
    sums go by `reduction` (see `harness.schedule.zero.data_parallel`) and the weights are gathered at last.

    Left out: the shapes that travel before the first message of a run, and the few numbers of the loss and of the
    gradient's norm. Raises ValueError for two stages on one device, hops that pass over a stage, and replicas without
    the bytes of each stage.
    """
    _check(devices, hops, replicas, parameter_bytes)
    placed = []
    for j, device in enumerate(devices):
        ops = list(_steps(j, len(devices), micro_batches, hops, recompute))
        ops += [Op(j, "collective", None, tie.part, bytes=tie.bytes) for tie in ties if j in tie.stages]
        if replicas > 1:
            ops.append(over_replicas(j, reduction if zero else "all_reduce", parameter_bytes[j]))
        ops.append(Op(j, "step"))
        if replicas > 1 and zero:
            ops.append(over_replicas(j, "all_gather", parameter_bytes[j]))
        placed += [((device, "compute"), op) for op in ops]
    return Schedule(lanes_of(placed), tuple(devices), replicas=replicas, rendezvous=True)


def _check(devices: Sequence[int], hops: Sequence[Hop], replicas: int, parameter_bytes: Sequence[int]) -> None:
    n = len(devices)
    for j, device in enumerate(devices):
        first = devices.index(device)
        if first != j:
            raise ValueError(
                f"stages {first} and {j}   are both on device {device}, DeepSpeed needs one device for each stage   "
                f"-> {n} devices"
            )
    for hop in hops:
        if hop.target != hop.source + 1:
            raise ValueError(
                f"skip {hop.part}   goes from stage {hop.source} to stage {hop.target}, DeepSpeed sends to the next "
                f"stage only   -> a hop to each stage in between (portals=False)"
            )
    if replicas > 1 and len(parameter_bytes) != n:
        raise ValueError(
            f"parameter_bytes   are those of {len(parameter_bytes)} stages, the {replicas} replicas have {n} stages   "
            f"-> {n} numbers"
        )


def _steps(j: int, n: int, micro_batches: int, hops: Sequence[Hop], recompute: str) -> Iterator[Op]:
    """Tasks and messages of stage j, step by step: forward where step and stage are both even or both odd.

    A step of either kind first deals with the stage before (forward) or behind (backward):
    forward    send the gradient of the step before, receive the activation, F
    backward   receive the gradient, send the activation of the step before, B
    """
    before = [hop for hop in hops if hop.target == j]
    behind = [hop for hop in hops if hop.source == j]
    there = range(micro_batches)
    for step in range(2 * (micro_batches + n - 1)):
        forward, back = (step - j) // 2, (step + j + 1) // 2 - n  # rounded down: the step itself, or the one before
        if (step - j) % 2 == 0:
            if back in there:
                yield from (Op(j, "send", back, hop.part, hop.source, hop.bytes) for hop in before)
            if forward in there:
                yield from (Op(j, "recv", forward, hop.part, hop.source, hop.bytes) for hop in before)
                yield Op(j, "F", forward)
        else:
            if back in there:
                yield from (Op(j, "recv", back, hop.part, hop.target, hop.bytes) for hop in behind)
            if forward in there:
                yield from (Op(j, "send", forward, hop.part, hop.target, hop.bytes) for hop in behind)
            if back in there:
                yield from backward(j, back, micro_batches, recompute)
