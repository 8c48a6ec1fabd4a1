"""V-half and V-min: schedules of a repeated building block, whose length of life bounds the memory.

Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from harness.core.op import Kind, Op
from harness.schedule import Schedule, collect_queues
from harness.schedule.transfers import Transfer, with_messages

PERIOD = 6
"""Units of time of a building block: F, B and W of both chunks of a device."""


@dataclass(frozen=True)
class Offsets:
    """Units of time from a task on one device to the same one on the next: of the chunks `a`, on the way down the
    devices, and `b`, on the way up, forward and backward."""

    forward_a: int
    forward_b: int
    backward_b: int
    backward_a: int


MIN = Offsets(1, 1, 1, 1)
HALF = Offsets(2, 1, 2, 1)


def v_min(micro_batches: int, devices: int, transfers: Sequence[Transfer]) -> Schedule:
    """Returns V-min: the least memory of a schedule in a V, about a third of what 1F1B keeps.

    m=3, 2 devices; B is for the gradient of a stage's input, W for those of its weights
    time      0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17  18  19  20
    device 0  0F0 .   .   3F0 3B0 3W0 0F1 0B0 0W0 3F1 3B1 3W1 0F2 0B1 0W1 3F2 3B2 3W2 .   0B2 0W2
    device 1  .   1F0 2F0 .   .   2B0 1B0 1F1 2F1 2W0 1W0 2B1 1B1 1F2 2F2 2W1 1W1 2B2 1B2 2W2 1W2

    Device r of n holds the stages r and 2n - 1 - r. Each task follows the one before it without delay, so a micro-batch
    is back at once: a device keeps 4n/6 halves of its layers or a few more, and is idle in between. `transfers` connect
    the 2n stages.
    """
    return _repeated(micro_batches, devices, transfers, MIN)


def v_half(micro_batches: int, devices: int, transfers: Sequence[Transfer]) -> Schedule:
    """Returns V-half: half of the memory of 1F1B, and a smaller bubble than V-min's.

    m=3, 2 devices; B is for the gradient of a stage's input, W for those of its weights
    time      0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17  18  19  20  21
    device 0  0F0 .   .   3F0 3B0 0F1 3W0 .   3F1 3B1 0F2 0B0 3W1 0W0 3F2 3B2 0B1 3W2 0W1 .   0B2 0W2
    device 1  .   1F0 2F0 .   .   2B0 1F1 2F1 2W0 1B0 2B1 1F2 2F2 2W1 1W0 1B1 2B2 2W2 1W1 1B2 1W2 .

    Micro-batches go down the devices, forward and backward, at half the speed: a device keeps n halves of its layers
    or a few more.
    """
    return _repeated(micro_batches, devices, transfers, HALF)


def _repeated(micro_batches: int, n: int, transfers: Sequence[Transfer], offsets: Offsets) -> Schedule:
    """Repeats the building block for each micro-batch; what starts as early as it can then has the block's order."""
    placed = [*range(n), *reversed(range(n))]
    blocks = building_block(n, offsets)
    orders = []
    for block in blocks:
        timed = [
            (start + PERIOD * i, Op(stage, kind, i))
            for (stage, kind), start in block.items()
            for i in range(micro_batches)
        ]
        orders.append([op for _, op in sorted(timed, key=lambda one: one[0])])
    return Schedule(collect_queues(with_messages(orders, placed, transfers)), tuple(placed))


def building_block(n: int, offsets: Offsets) -> list[dict[tuple[int, Kind], int]]:
    """Returns when each device starts the tasks of one micro-batch: its block, which repeats every `PERIOD`.

    Tasks of a device must differ modulo `PERIOD`. Where they do not, the passes turn round at the first and last device
    as little later as is enough; W takes the first slots that are left after its own B.
    """
    for _, *delays in sorted((sum(delays), *delays) for delays in product(range(PERIOD), repeat=3)):
        blocks = [dict(_passes(n, r, offsets, delays)) for r in range(n)]
        if all(len({start % PERIOD for start in block.values()}) == len(block) for block in blocks):
            return [_with_weights(block) for block in blocks]
    raise AssertionError("four tasks always fit into six slots")


def _passes(n: int, r: int, offsets: Offsets, delays: Sequence[int]) -> Iterator[tuple[tuple[int, Kind], int]]:
    a, b, last = r, 2 * n - 1 - r, n - 1
    yield (a, "F"), offsets.forward_a * r
    turn = offsets.forward_a * last + 1 + delays[0]
    yield (b, "F"), turn + offsets.forward_b * (last - r)
    turn += offsets.forward_b * last + 1 + delays[1]
    yield (b, "B"), turn + offsets.backward_b * r
    turn += offsets.backward_b * last + 1 + delays[2]
    yield (a, "B"), turn + offsets.backward_a * (last - r)


def _with_weights(block: dict[tuple[int, Kind], int]) -> dict[tuple[int, Kind], int]:
    taken = {start % PERIOD for start in block.values()}
    for (stage, kind), start in sorted(block.items(), key=lambda one: one[1]):
        if kind == "B":
            slot = next(slot for slot in range(start + 1, start + 1 + PERIOD) if slot % PERIOD not in taken)
            taken.add(slot % PERIOD)
            block[stage, "W"] = slot
    return block
