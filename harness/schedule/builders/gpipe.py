"""The GPipe schedule as torchgpipe runs it (torchgpipe, sections 2.1, 3.1 and 3.2)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush

from harness.core.op import Op
from harness.core.trace import DeviceQueue
from harness.schedule import Schedule, collect_queues
from harness.schedule.transfers import Transfer

RECOMPUTE = ("always", "except_last", "never")


def clock_cycles(micro_batches: int, stages: int) -> Iterator[list[tuple[int, int]]]:
    """Yields the tasks (i, j), micro-batch i on stage j, of each cycle k = i + j (section 3.2.1).

    m=4 n=3   cycle   0      1      2      3      4      5
    stage 0          (0,0)  (1,0)  (2,0)  (3,0)
    stage 1                 (0,1)  (1,1)  (2,1)  (3,1)
    stage 2                        (0,2)  (1,2)  (2,2)  (3,2)
    """
    for k in range(micro_batches + stages - 1):
        yield [(k - j, j) for j in range(max(0, k - micro_batches + 1), min(k, stages - 1) + 1)]


def recomputed(micro_batch: int, micro_batches: int, mode: str) -> bool:
    """Returns whether the checkpoint `mode` recomputes this micro-batch (section 2.1: the last one need not be)."""
    return mode == "always" or (mode == "except_last" and micro_batch < micro_batches - 1)


def gpipe(
    micro_batches: int,
    devices: Sequence[int],
    transfers: Sequence[Transfer],
    recompute: str = "except_last",
    dependency: bool = True,
    streams: bool = True,
) -> Schedule:
    """Runs all forwards in clock-cycles, then the backward pass as autograd runs it.

    `devices[j]` is the device of stage j. With `dependency` (fork and join) the order of the backward ops is the
    reverse of the order in which their forward twins were created, and a recomputation runs right before its backward
    task:

        stage j   0F 1F 2F | 2R 2B 1R 1B 0R 0B

    Without it a recomputation runs as soon as the gradient of its output is there, before any backward task
    (`ready_order`). On the last stage that is at once; all the others hold what the next task needs, and more:

        stage 1   0F 1F 2F | 2R 1R 0R 2B 1B 0B
        stage 0   0F 1F 2F |             2R 2B 1R 1B 0R 0B

    Without `streams` a copy occupies the compute queues of both devices.
    """
    created = creation_order(micro_batches, devices, transfers, recompute)
    forward = [op for op in created if op.kind != "R"]
    backward = [_twin(op) for op in reversed(created)]
    if not dependency:
        backward = ready_order(backward, devices, transfers)
    steps = [Op(j, "step") for j in range(len(devices))]
    return Schedule(
        collect_queues(_placed([*forward, *backward, *steps], devices, streams)), tuple(devices), loss="gathered"
    )


def creation_order(
    micro_batches: int, devices: Sequence[int], transfers: Sequence[Transfer], recompute: str
) -> list[Op]:
    """Returns forward ops and recomputations in the order in which their autograd nodes are created.

    In each cycle the copies come before the computations (section 3.2.1).
    """
    into: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        if devices[transfer.source] != devices[transfer.target]:
            into[transfer.target].append(transfer)
    created: list[Op] = []
    for cycle in clock_cycles(micro_batches, len(devices)):
        for i, j in cycle:
            created += [
                Op(j, "copy", i, transfer.part, transfer.source, transfer.bytes, "copy in") for transfer in into[j]
            ]
        for i, j in cycle:
            created.append(Op(j, "F", i))
            if recomputed(i, micro_batches, recompute):
                created.append(Op(j, "R", i))
    return created


def ready_order(backward: Sequence[Op], devices: Sequence[int], transfers: Sequence[Transfer]) -> list[Op]:
    """Returns backward ops, given latest created first, in autograd's order without fork and join.

    A copy of a gradient waits for the backward task that makes it, a recomputation for the gradient of its stage's own
    output, a backward task for its recomputation, the gradients of all that its stage sent and the next stage's task.
    Of the ops that are ready autograd takes copies and recomputations first, then the task created last: torchgpipe
    creates the nodes of its tasks in worker threads, which number them apart.
    """
    needs = {op: _needs(op, devices, transfers) & set(backward) for op in backward}
    rank = {op: (op.kind == "B", place) for place, op in enumerate(backward)}
    after: dict[Op, list[Op]] = defaultdict(list)
    for op, before in needs.items():
        for earlier in before:
            after[earlier].append(op)
    ready = [(rank[op], op) for op, before in needs.items() if not before]
    heapify(ready)
    order = []
    while ready:
        op = heappop(ready)[1]
        order.append(op)
        for following in after[op]:
            needs[following].remove(op)
            if not needs[following]:
                heappush(ready, (rank[following], following))
    return order


def _needs(op: Op, devices: Sequence[int], transfers: Sequence[Transfer]) -> set[Op]:
    """Returns what a backward op waits for, some of which the schedule may not have."""
    i = op.micro_batch
    if op.kind == "copy":  # the gradient of what stage op.stage sent comes from stage op.peer
        return {Op(op.peer or 0, "B", i)}
    sent = [transfer for transfer in transfers if transfer.source == op.stage]
    if op.kind == "R":
        return {_gradient(transfer, i, devices) for transfer in sent if not transfer.part}
    gradients = {_gradient(transfer, i, devices) for transfer in sent}
    return gradients | {Op(op.stage, "R", i), Op(op.stage + 1, "B", i)}


def _gradient(transfer: Transfer, i: int | None, devices: Sequence[int]) -> Op:
    """Returns the op that brings the gradient of a value to the stage that sent it."""
    if devices[transfer.source] == devices[transfer.target]:
        return Op(transfer.target, "B", i)
    return Op(transfer.source, "copy", i, transfer.part, transfer.target, transfer.bytes, "copy in")


def _twin(op: Op) -> Op:
    if op.kind == "F":
        return Op(op.stage, "B", op.micro_batch)
    if op.kind == "copy" and op.peer is not None:
        return Op(op.peer, "copy", op.micro_batch, op.part, op.stage, op.bytes, op.queue)
    return op


def _placed(ops: Sequence[Op], devices: Sequence[int], streams: bool) -> Iterator[tuple[DeviceQueue, Op]]:
    """Yields each op with its queue; a copy without streams, with both queues."""
    compute: list[DeviceQueue] = [(device, "compute") for device in devices]
    copy_in: list[DeviceQueue] = [(device, "copy in") for device in devices]
    for op in ops:
        if op.kind != "copy" or op.peer is None:
            yield compute[op.stage], op
        elif streams:
            yield copy_in[op.stage], op
        else:
            yield compute[op.peer], op
            yield compute[op.stage], op


def with_recomputation(schedule: Schedule, micro_batches: int, mode: str) -> Schedule:
    """Returns a schedule without recomputations with those of a checkpoint `mode`, each right before its backward task.

    device 1   1F0 1B0 1F1 1B1   -->   1F0 1R0 1B0 1F1 1B1      except_last
    """
    queues = []
    for queue in schedule.queues:
        ops: list[Op] = []
        for op in queue.ops:
            if op.kind == "B" and op.micro_batch is not None and recomputed(op.micro_batch, micro_batches, mode):
                ops.append(Op(op.stage, "R", op.micro_batch))
            ops.append(op)
        queues.append(replace(queue, ops=tuple(ops)))
    return replace(schedule, queues=tuple(queues))
