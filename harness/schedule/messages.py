"""Messages that leave as soon as they can: only links and ports limit them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from harness.op import Op
from harness.schedule.hops import Hop
from harness.trace import Lane


def with_messages(
    orders: Iterable[Sequence[Op]], devices: Sequence[int], hops: Sequence[Hop]
) -> Iterator[tuple[Lane, Op]]:
    """The tasks of each device in order, each behind the messages that it waits for; at the end the optimizer's steps.

    stage j compute   F(i, j)       B(i, j)       step(j)      `devices[j]` is the device of stage j
                         ^             ^
    stage j network   (i from j-1)  (i from j+1)               gradients come back on the way of the data
    """
    compute: list[Lane] = [(device, "compute") for device in devices]
    network: list[Lane] = [(device, "network") for device in devices]
    into: dict[int, list[Hop]] = defaultdict(list)
    back: dict[int, list[Hop]] = defaultdict(list)
    for hop in hops:
        if devices[hop.source] != devices[hop.target]:
            into[hop.target].append(hop)
            back[hop.source].append(hop)
    for order in orders:
        for op in order:
            i, j = op.micro_batch, op.stage
            if op.kind == "F":
                for hop in into[j]:
                    yield network[j], Op(j, "copy", i, hop.part, hop.source, hop.bytes, "network")
            elif op.kind == "B":
                for hop in back[j]:
                    yield network[j], Op(j, "copy", i, hop.part, hop.target, hop.bytes, "network")
            yield compute[j], op
    for j, lane in enumerate(compute):
        yield lane, Op(j, "step")
