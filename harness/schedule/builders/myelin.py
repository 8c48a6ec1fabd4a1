"""Myelin's schedule: message-driven tasks (Algorithms 1 and 2), and a step that ends in chunks (section V-C)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, get_args

from harness.core.op import Op, Queue
from harness.core.problem import Problem, ProblemError
from harness.core.trace import DeviceQueue
from harness.schedule import QueueOps, Schedule, queues_in_order
from harness.schedule.builders.fill_drain import fill_drain
from harness.schedule.builders.message_driven import message_driven
from harness.schedule.builders.one_f_one_b import check_one_stage_each, one_f_one_b
from harness.schedule.dependency_graph import DATA
from harness.schedule.optimizer_chunks import HALVES, IN, OUT
from harness.schedule.policy import RuleName
from harness.schedule.tied_weight_ops import Tie
from harness.schedule.transfers import Transfer

Order = Literal["message_driven", "1f1b", "gpipe"]
ORDERS: tuple[Order, ...] = get_args(Order)


@dataclass(frozen=True)
class Chunk:
    """Parameters of a stage that are reduced and updated together: their bytes, and for each bucket that is copied to
    the device the bytes of its halves (no bucket where the optimizer's state stays on the device). `tied` of the bytes
    belong to parameters that have already been reduced, over all copies."""

    bytes: int
    buckets: tuple[tuple[int, ...], ...] = ()
    tied: int = 0

    @property
    def needs_all_reduce(self) -> bool:
        """Whether an all-reduce over replicas is left to do."""
        return self.tied < self.bytes or not self.bytes


def split_into_chunks(
    elements: int, width: int, bsize: int, k: int, offload: bool = False, tied: int = 0
) -> tuple[Chunk, ...]:
    """Splits `elements` parameters of `width` bytes into chunks: k buckets of `bsize` parameters each.

    |= bucket0 =|= bucket1 =|= bucket2 =|= bucket3 =|= b4 =|      k = 2: three chunks, the last one is shorter
    |======== chunk0 =======|======== chunk1 =======|chunk2|

    With k = 0 one chunk has them all; without parameters there is none. Only with `offload` buckets are copied to the
    device, in two halves; the first half may have a parameter more, and a bucket of one parameter has no second half.
    The last `tied` parameters have copies on other devices.
    """
    buckets = [min(bsize, elements - start) for start in range(0, elements, bsize)]
    per_chunk = k or max(1, len(buckets))
    groups = [buckets[first : first + per_chunk] for first in range(0, len(buckets), per_chunk)]
    halves = [tuple(tuple(half * width for half in (n - n // 2, n // 2) if half) for n in group) for group in groups]
    starts = range(0, elements, per_chunk * bsize)
    chunks = []
    for start, group, own_halves in zip(starts, groups, halves, strict=True):
        stop = start + sum(group)
        shared = max(0, stop - max(start, elements - tied))
        chunks.append(Chunk((stop - start) * width, own_halves if offload else (), shared * width))
    return tuple(chunks)


def myelin(
    micro_batches: int,
    devices: Sequence[int],
    transfers: Sequence[Transfer],
    order: Order = "message_driven",
    rule: RuleName = "fifo",
    limit: int | None = None,
    ties: Sequence[Tie] = (),
    replicas: int = 1,
    chunks: Sequence[Sequence[Chunk]] = (),
    overlap: bool = True,
    barrier: bool = False,
) -> Schedule:
    """Each stage runs what has arrived, then all-reduces and updates its parameters chunk by chunk.

    m=4 n=3
    time      0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17
    device 0  0F0 0F1 0F2 .   .   .   .   0B0---- 0F3 0B1---- .   0B2---- .   0B3----
    device 1  .   1F0 1F1 1F2 .   1B0---- .   1B1---- 1F3 1B2---- .   1B3---- .   .
    device 2  .   .   2F0 2B0---- 2F1 2B1---- 2F2 2B2---- 2F3 2B3---- .   .   .   .

    The order of tasks is "message_driven" (`message_driven`): at most `limit` micro-batches are in the pipeline (by
    default, as many as there are stages); the first stage sends another one in after each backward task, the last one
    goes back at once, those in the middle pick by `rule` among the tasks whose messages have arrived. Where all stages
    take the same time and messages take none, "backward_first" and "alternate" reach 1F1B's step time; "fifo" and
    "forward_first" lose a few tasks' time, once in a step, on five stages and more. In "1f1b" and "gpipe" order it is
    fixed (`one_f_one_b`, `fill_drain`), with the same messages: those of `transfers`, directly to the stage that needs
    them. `devices[j]` is the device of stage j.

    The end of a step, for each stage with its `chunks[j]` (`split_into_chunks`; by default one without bytes):

    compute    all B |all_reduce@copies/...|              |step:chunk0|             |step:chunk1|
    network                                |sum of chunk0 |sum of chunk1|sum of chunk2|

    The gradients of `ties` are all-reduced once, over their copies in all replicas; chunks leave them out. The
    all-reduces over `replicas` (the data parallel size) are in the network's queue, so that they overlap with the
    updates; without `overlap` they are in the compute queue, all before the first update. With a `barrier` they begin
    when all stages have ended their tasks. Each half (a, b) of an
    offloaded bucket arrives in the queue "copy in", is updated by a step of its own, and leaves in the queue
    "copy out":

    copy in    |chunk0/bucket0a/in|chunk0/bucket0b/in|       |chunk0/bucket1a/in|
    compute                       |step:chunk0/bucket0a|step:chunk0/bucket0b|
    copy out                                           |chunk0/bucket0a/out|

    The bytes of steps and copies count parameters only; the memory model knows the optimizer's bytes for each
    parameter. Raises ProblemError for an unknown order or rule, a limit below 1, and two stages on one device.
    """
    schedule = _tasks(micro_batches, devices, transfers, order, rule, limit)
    ends: dict[int, list[tuple[Queue, tuple[Op, ...]]]] = {}
    for j, device in enumerate(devices):
        tied = tuple(Op(j, "collective", None, tie.part, bytes=tie.bytes) for tie in ties if j in tie.stages)
        own = tuple(chunks[j]) if chunks else (Chunk(0),)
        ends[device] = [("compute", tied), *_end(j, own, replicas > 1, overlap)]
    return replace(schedule, queues=_extended(schedule, ends), replicas=replicas, barrier=barrier)


def _extended(schedule: Schedule, ends: Mapping[int, Iterable[tuple[Queue, Sequence[Op]]]]) -> tuple[QueueOps, ...]:
    """The queues of a schedule with what each device does at the end of a step in the place of its own step."""
    rules: dict[DeviceQueue, RuleName] = {(queue.device, queue.name): queue.rule for queue in schedule.queues}
    queues: defaultdict[DeviceQueue, list[Op]] = defaultdict(list)
    for queue in schedule.queues:
        tasks = [op for op in queue.ops if op.kind != "step"] if queue.name == "compute" else queue.ops
        queues[queue.device, queue.name] += tasks
    for device, own in ends.items():
        for name, ops in own:
            queues[device, name] += ops
    return queues_in_order(queues, rules)


def _tasks(
    micro_batches: int,
    devices: Sequence[int],
    transfers: Sequence[Transfer],
    order: str,
    rule: RuleName,
    limit: int | None,
) -> Schedule:
    if order not in ORDERS:
        raise ProblemError(Problem("order", order, f"is none of {', '.join(ORDERS)}", ({"order": ORDERS[0]},)))
    check_one_stage_each(devices, "myelin")
    if order == "1f1b":
        return one_f_one_b(micro_batches, devices, transfers)
    if order == "gpipe":
        return fill_drain(micro_batches, devices, transfers)
    return message_driven(micro_batches, devices, transfers, rule, len(devices) if limit is None else limit)


@lru_cache(maxsize=128)
def _end(j: int, chunks: tuple[Chunk, ...], reduced: bool, overlap: bool) -> tuple[tuple[Queue, tuple[Op, ...]], ...]:
    """Returns all-reduces over replicas, if gradients are `reduced`, steps and copies of a stage: those of each queue,
    in order of issue. The same for all plans that have these chunks there: a search makes them once."""
    found: defaultdict[Queue, list[Op]] = defaultdict(list)
    for op in _ends(j, chunks, reduced, "network" if overlap else "compute"):
        found[op.queue].append(op)
    return tuple((queue, tuple(ops)) for queue, ops in found.items())


def _ends(j: int, chunks: Sequence[Chunk], reduced: bool, queue: Queue) -> Iterator[Op]:
    for c, chunk in enumerate(chunks if reduced else ()):
        if chunk.needs_all_reduce:
            size = chunk.bytes - chunk.tied
            yield Op(j, "collective", None, f"all_reduce@{DATA}/chunk{c}", bytes=size, queue=queue)
    number = 0
    for c, chunk in enumerate(chunks):
        if not chunk.buckets:
            yield Op(j, "step", None, f"chunk{c}", bytes=chunk.bytes)
        for halves in chunk.buckets:
            for letter, size in zip(HALVES, halves, strict=False):
                part = f"chunk{c}/bucket{number}{letter}"
                yield Op(j, "copy", None, f"{part}/{IN}", bytes=size, queue="copy in")
                yield Op(j, "step", None, part, bytes=size)
                yield Op(j, "copy", None, f"{part}/{OUT}", bytes=size, queue="copy out")
            number += 1
