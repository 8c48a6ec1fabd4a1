"""Periodic schedules (MadPipe, section 4): a pattern, unrolled over a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from harness.op import Op
from harness.pattern import Pattern
from harness.schedule import Schedule, lanes_of
from harness.schedule.hops import Hop
from harness.schedule.messages import with_messages
from harness.trace import Lane

TASKS = ("F", "B", "W", "R")


def unrolled(
    pattern: Pattern,
    micro_batches: int,
    devices: Sequence[int],
    hops: Sequence[Hop],
    update_every: int | None = None,
) -> Schedule:
    """Every device runs its ops in the order in which the pattern starts them: `start_s` + (i + shift) * period.

    period    |   0   |   1   |   2   |   3        two stages: 0F, 1F and 1B with shift 0, 0B with shift 1
    device 0   0F0     0F1 0B0 0F2 0B1     0B2
    device 1     1F0 1B0 1F1 1B1 1F2 1B2

    Only the order is kept, not the idle time: ops start as early as they can. So it is with the messages that the
    pattern places, for each pair of devices (without their order, those that are early could make a period longer);
    each other one of `hops` leaves as soon as it can. `devices[j]` is the device of stage j; raises ValueError
    where the pattern places a task of it elsewhere.

    The optimizer ends the step. With `update_every` it steps a stage each time so many micro-batches are through, and
    after the last one (PipeDream-2BW; what is under way goes on with the version of the weights that it began with):

    update_every=2      ... 0B0 0F3 0B1 0step1 0F4 0B2 0F5 0B3 0step3 ...
    """
    _check_homes(pattern, devices)
    order = _in_time(pattern, micro_batches)
    tasks = [op for op, _ in order if op.kind in TASKS]
    others: list[tuple[Lane, Op]] = [((device, op.queue), op) for op, device in order if op.kind not in TASKS]
    leave = {op for _, op in others}
    if update_every is not None:
        tasks = list(_with_steps(tasks, micro_batches, update_every))
        leave |= {Op(j, "step") for j in range(len(devices))}
    rest = (entry for entry in with_messages([tasks], devices, hops) if entry[1] not in leave)
    return Schedule(lanes_of(chain(rest, others)), tuple(devices), in_line=_in_line([op for _, op in others], devices))


def _check_homes(pattern: Pattern, devices: Sequence[int]) -> None:
    for placed in pattern.ops:
        if placed.op.kind in TASKS and placed.device != devices[placed.op.stage]:
            raise ValueError(
                f"{placed.op} of stage {placed.op.stage}   is on device {placed.device} in the pattern, its stage on "
                f"device {devices[placed.op.stage]}   -> device {devices[placed.op.stage]}"
            )


def _in_time(pattern: Pattern, micro_batches: int) -> list[tuple[Op, int]]:
    """All ops with their devices, in order of their start; the order is the same in every period."""
    timed = []
    for placed in pattern.ops:
        periods = math.floor(placed.start_s / pattern.period_s)
        start_s = placed.start_s - periods * pattern.period_s
        for i in range(micro_batches):
            timed.append((i + placed.shift + periods, start_s, i, replace(placed.op, micro_batch=i), placed.device))
    timed.sort(key=lambda entry: entry[:3])
    return [(op, device) for *_, op, device in timed]


def _in_line(messages: Sequence[Op], devices: Sequence[int]) -> tuple[tuple[Op, ...], ...]:
    """The messages of each pair of devices, in both directions."""
    found: dict[frozenset[int], list[Op]] = {}
    for op in messages:
        if op.kind == "copy" and op.peer is not None:
            found.setdefault(frozenset((devices[op.stage], devices[op.peer])), []).append(op)
    return tuple(map(tuple, found.values()))


def _with_steps(tasks: Sequence[Op], micro_batches: int, update_every: int) -> Iterator[Op]:
    """Each step behind the last task of its stage that adds to its gradients; raises ValueError for no micro-batch."""
    if update_every < 1:
        raise ValueError(f"update_every is {update_every}, must be at least 1")
    halved = {op.stage for op in tasks if op.kind == "W"}
    for op in tasks:
        yield op
        i = op.micro_batch
        assert i is not None
        if op.kind == ("W" if op.stage in halved else "B") and ((i + 1) % update_every == 0 or i + 1 == micro_batches):
            yield Op(op.stage, "step", i)
