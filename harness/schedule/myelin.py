"""Myelin's schedule: message-driven tasks (Algorithms 1 and 2), and a step that ends in chunks (section V-C)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from harness.op import Op, Queue
from harness.schedule import Schedule, lanes_of
from harness.schedule.chunks import HALVES, IN, OUT
from harness.schedule.fill_drain import fill_drain
from harness.schedule.graph import DATA
from harness.schedule.hops import Hop
from harness.schedule.message_driven import message_driven
from harness.schedule.one_f_one_b import one_f_one_b
from harness.schedule.rule import RuleName
from harness.schedule.ties import Tie
from harness.trace import Lane

Order = Literal["message_driven", "1f1b", "gpipe"]
ORDERS: tuple[Order, ...] = get_args(Order)


@dataclass(frozen=True)
class Chunk:
    """Parameters of a stage that are summed and updated together: their bytes, and for each bucket that visits the
    device those of its halves (no bucket where the optimizer's state stays there). Of the bytes `tied` are those of
    parameters that have been summed before, over all copies."""

    bytes: int
    buckets: tuple[tuple[int, ...], ...] = ()
    tied: int = 0

    @property
    def summed(self) -> bool:
        """Whether there is anything left to sum over replicas."""
        return self.tied < self.bytes or not self.bytes


def chunks_of(elements: int, width: int, bsize: int, k: int, offload: bool = False, tied: int = 0) -> tuple[Chunk, ...]:
    """The chunks of a stage with so many parameters of `width` bytes: k buckets of `bsize` parameters each.

    |= bucket0 =|= bucket1 =|= bucket2 =|= bucket3 =|= b4 =|      k = 2: three chunks, the last one is shorter
    |======== chunk0 =======|======== chunk1 =======|chunk2|

    With k = 0 one chunk has them all; without parameters there is none. Only with `offload` buckets visit the device,
    in two halves; the first one may have a parameter more, and a bucket of one parameter has no second one. The last
    `tied` parameters have copies on other devices.
    """
    buckets = [min(bsize, elements - start) for start in range(0, elements, bsize)]
    each = k or max(1, len(buckets))
    groups = [buckets[first : first + each] for first in range(0, len(buckets), each)]
    halves = [tuple(tuple(half * width for half in (n - n // 2, n // 2) if half) for n in group) for group in groups]
    starts = range(0, elements, each * bsize)
    found = []
    for start, group, own in zip(starts, groups, halves, strict=True):
        stop = start + sum(group)
        shared = max(0, stop - max(start, elements - tied))
        found.append(Chunk((stop - start) * width, own if offload else (), shared * width))
    return tuple(found)


def myelin(
    micro_batches: int,
    devices: Sequence[int],
    hops: Sequence[Hop],
    order: Order = "message_driven",
    rule: RuleName = "fifo",
    limit: int | None = None,
    ties: Sequence[Tie] = (),
    replicas: int = 1,
    chunks: Sequence[Sequence[Chunk]] = (),
    overlap: bool = True,
) -> Schedule:
    """Each stage runs what has arrived, then sums and updates its parameters chunk by chunk.

    m=4 n=3
    time      0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17
    device 0  0F0 0F1 0F2 .   .   .   .   0B0---- 0F3 0B1---- .   0B2---- .   0B3----
    device 1  .   1F0 1F1 1F2 .   1B0---- .   1B1---- 1F3 1B2---- .   1B3---- .   .
    device 2  .   .   2F0 2B0---- 2F1 2B1---- 2F2 2B2---- 2F3 2B3---- .   .   .   .

    The order of tasks is "message_driven": each device picks by `rule` among the tasks whose messages are there
    (`harness.schedule.rule`), and the first stage lets at most `limit` micro-batches into the pipeline (without one, as
    many as there are stages). The last stage, whatever the rule, goes back at once with what has come. Where all stages
    are alike and messages take no time, each rule comes to 1F1B's step time by itself (on more than four stages it
    loses about a task for each, once in a step). In "1f1b" and "gpipe" order it is fixed (`one_f_one_b`, `fill_drain`),
    with the same messages: those of `hops`, straight to the stage that needs them. `devices[j]` is the device of
    stage j.

    The end of a step, of each stage with its `chunks[j]` (`chunks_of`; by default one without bytes):

    compute    all B |all_reduce@copies/...|              |step:chunk0|             |step:chunk1|
    network                                |sum of chunk0 |sum of chunk1|sum of chunk2|

    Parameters of `ties` are summed once, over their copies in all replicas; chunks leave them out. The sums over
    `replicas` stand in the network's queue, so that they overlap with the updates; without `overlap` in
    the compute queue, all before the first update. Each half (a, b) of a bucket that visits the device comes in the
    queue "copy in", is updated by a step of its own, and goes in the queue "copy out":

    copy in    |chunk0/bucket0a/in|chunk0/bucket0b/in|       |chunk0/bucket1a/in|
    compute                       |step:chunk0/bucket0a|step:chunk0/bucket0b|
    copy out                                           |chunk0/bucket0a/out|

    The bytes of steps and copies are those of their parameters: what the optimizer has for each of these, the memory
    model knows. Raises ValueError for an unknown order or rule, a limit below 1, and two stages on one device.
    """
    schedule = _tasks(micro_batches, devices, hops, order, rule, limit)
    placed: list[tuple[Lane, Op]] = [
        ((lane.device, lane.queue), op) for lane in schedule.lanes for op in lane.ops if op.kind != "step"
    ]
    for j, device in enumerate(devices):
        sums = [Op(j, "collective", None, tie.part, bytes=tie.bytes) for tie in ties if j in tie.stages]
        end = _end(j, chunks[j] if chunks else (Chunk(0),), replicas, overlap)
        placed += [((device, op.queue), op) for op in [*sums, *end]]
    picked: dict[int, RuleName] = dict.fromkeys(devices, rule) | {devices[-1]: "backward_first"}
    lanes = (
        replace(lane, rule=picked[lane.device]) if lane.queue == "compute" and order == "message_driven" else lane
        for lane in lanes_of(placed)
    )
    return replace(schedule, lanes=tuple(lanes), replicas=replicas)


def _tasks(
    micro_batches: int, devices: Sequence[int], hops: Sequence[Hop], order: str, rule: RuleName, limit: int | None
) -> Schedule:
    if order not in ORDERS:
        raise ValueError(f"order {order}   is none of {', '.join(ORDERS)}   -> {ORDERS[0]}")
    for j, device in enumerate(devices):
        first = devices.index(device)
        if first != j:
            raise ValueError(
                f"stages {first} and {j}   are both on device {device}, myelin needs one device for each stage   "
                f"-> {len(devices)} devices"
            )
    if order == "1f1b":
        return one_f_one_b(micro_batches, devices, hops)
    if order == "gpipe":
        return fill_drain(micro_batches, devices, hops)
    return message_driven(micro_batches, devices, hops, rule, len(devices) if limit is None else limit)


def _end(j: int, chunks: Sequence[Chunk], replicas: int, overlap: bool) -> Iterator[Op]:
    """Sums over replicas, steps and copies of a stage, in each queue in the order in which they are issued."""
    queue: Queue = "network" if overlap else "compute"
    for c, chunk in enumerate(chunks if replicas > 1 else ()):
        if chunk.summed:
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
