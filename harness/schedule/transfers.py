"""Which tensors are sent between stages: layer outputs at the boundaries, and skips with or without portals.

Messages start as soon as they can: only links and ports limit them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from harness.core.model_profile import ModelProfile
from harness.core.op import Op
from harness.core.plan import Plan
from harness.core.trace import DeviceQueue


@dataclass(frozen=True)
class Transfer:
    """A value that stage `target` gets from stage `source` (an earlier one). `part` is "" for the layer output."""

    source: int
    target: int
    part: str = ""
    bytes: int = 0


@dataclass(frozen=True)
class StageSkip:
    """A skip between stages: stashed in stage `source`, popped in stage `target`."""

    source: int
    target: int
    name: str
    bytes: int = 0


def transfers(boundaries: Iterable[int], skips: Iterable[StageSkip], portals: bool) -> list[Transfer]:
    """Lists all transfers of one micro-batch, by target; `boundaries[j]` are the bytes that enter stage j + 1.

    Skips come before the boundary: they are made earlier, and copies to a device run one after the other.

    stage     0       1       2       3
    portals   s ----------------------> t        one copy
    without   s ----> . ----> . ------> t        a copy to every stage in between
    """
    result = [Transfer(j, j + 1, "", size) for j, size in enumerate(boundaries)]
    for skip in skips:
        if portals:
            result.append(Transfer(skip.source, skip.target, skip.name, skip.bytes))
        else:
            result += [Transfer(j, j + 1, skip.name, skip.bytes) for j in range(skip.source, skip.target)]
    return sorted(result, key=lambda transfer: (transfer.target, transfer.part == "", transfer.source, transfer.part))


def plan_transfers(plan: Plan, profile: ModelProfile, portals: bool) -> list[Transfer]:
    """Lists the transfers of a planned model; values that stay inside a stage are not sent."""
    skips = []
    for skip in profile.skips:
        source, target = plan.stage_of(skip.source), plan.stage_of(skip.target)
        if source != target:
            skips.append(StageSkip(source, target, skip.name, skip.bytes))
    return transfers([profile.boundary_bytes(stage.first) for stage in plan.stages[1:]], skips, portals)


def with_messages(
    orders: Iterable[Sequence[Op]], devices: Sequence[int], transfers: Sequence[Transfer]
) -> Iterator[tuple[DeviceQueue, Op]]:
    """Yields the tasks of each device in order, each after the messages that it waits for, then the optimizer's steps.

    stage j compute   F(i, j)       B(i, j)       step(j)      `devices[j]` is the device of stage j
                         ^             ^
    stage j network   (i from j-1)  (i from j+1)               gradients return along the path of the data
    """
    compute: list[DeviceQueue] = [(device, "compute") for device in devices]
    network: list[DeviceQueue] = [(device, "network") for device in devices]
    into: dict[int, list[Transfer]] = defaultdict(list)
    back: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        if devices[transfer.source] != devices[transfer.target]:
            into[transfer.target].append(transfer)
            back[transfer.source].append(transfer)
    for order in orders:
        for op in order:
            i, j = op.micro_batch, op.stage
            if op.kind == "F":
                for transfer in into[j]:
                    yield network[j], Op(j, "copy", i, transfer.part, transfer.source, transfer.bytes, "network")
            elif op.kind == "B":
                for transfer in back[j]:
                    yield network[j], Op(j, "copy", i, transfer.part, transfer.target, transfer.bytes, "network")
            yield compute[j], op
    for j, queue in enumerate(compute):
        yield queue, Op(j, "step")
