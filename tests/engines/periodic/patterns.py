"""Plans with patterns, made without a planner."""

from __future__ import annotations

from collections.abc import Sequence

from harness.core.op import Op
from harness.core.pattern import Pattern, Placed
from harness.core.plan import Mesh, Plan, Stage

FORWARD, BACKWARD = 1, 2


def plan(balance: Sequence[int], micro_batches: int, devices: Sequence[int] = (), slack: int = 0) -> Plan:
    """Stage j has `balance[j]` layers on `devices[j]` (device j without). `slack` slots are waited for each message:
    with more of them more micro-batches are under way."""
    devices = devices or range(len(balance))
    stages, first = [], 0
    for layers, device in zip(balance, devices, strict=True):
        stages.append(Stage(first, first + layers - 1, device))
        first += layers
    mesh = Mesh(pipeline=len(set(devices)))
    return Plan(mesh, tuple(stages), micro_batches, pattern=pattern(devices, slack))


def pattern(devices: Sequence[int], slack: int = 0) -> Pattern:
    """Each task of a micro-batch as soon as it can, where its device is free modulo the period, which is the shortest
    possible. A forward task takes a slot of time, a backward task two."""
    period = (FORWARD + BACKWARD) * max(map(list(devices).count, devices))
    while (found := _placed(devices, slack, period)) is None:
        period += 1
    return Pattern(period, tuple(found))


def _placed(devices: Sequence[int], slack: int, period: int) -> list[Placed] | None:
    taken: set[tuple[int, int]] = set()
    found, now = [], 0
    stages = range(len(devices))
    for op, length in [*((Op(j, "F", 0), FORWARD) for j in stages), *((Op(j, "B", 0), BACKWARD) for j in stages[::-1])]:
        device = devices[op.stage]
        fits = (t for t in range(now, now + period) if not taken & _slots(device, t, length, period))
        start = next(fits, None)
        if start is None:
            return None
        taken |= _slots(device, start, length, period)
        found.append(Placed(op, device, start % period, start // period))
        now = start + length + slack
    return found


def _slots(device: int, start: int, length: int, period: int) -> set[tuple[int, int]]:
    return {(device, slot % period) for slot in range(start, start + length)}
