"""Periodic schedules (MadPipe, section 4): unrolls a pattern over a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from harness.core.op import Op
from harness.core.pattern import Pattern
from harness.core.problem import Problem, ProblemError
from harness.core.trace import DeviceQueue
from harness.schedule import Schedule, collect_queues
from harness.schedule.transfers import Transfer, with_messages

TASKS = ("F", "B", "W", "R")


def unrolled(
    pattern: Pattern,
    micro_batches: int,
    devices: Sequence[int],
    transfers: Sequence[Transfer],
    update_every: int | None = None,
) -> Schedule:
    """Every device runs its ops in the order in which the pattern starts them: `start_s` + (i + shift) * period.

    period    |   0   |   1   |   2   |   3        two stages: 0F, 1F and 1B with shift 0, 0B with shift 1
    device 0   0F0     0F1 0B0 0F2 0B1     0B2
    device 1     1F0 1B0 1F1 1B1 1F2 1B2

    The schedule keeps the order of the pattern, not its idle time: ops start as early as they can. The messages that
    the pattern places keep their order, too, for each pair of devices (otherwise early ones could make a period
    longer); the other `transfers` start as soon as they can. `devices[j]` is the device of stage j. Raises ValueError
    where the pattern places a task of that stage on another device.

    The optimizer ends the step. With `update_every` it updates a stage each time that many micro-batches have ended,
    and after the last one (PipeDream-2BW; micro-batches in flight keep the weight version that they started with):

    update_every=2      ... 0B0 0F3 0B1 0step1 0F4 0B2 0F5 0B3 0step3 ...
    """
    _check_homes(pattern, devices)
    order = _in_time(pattern, micro_batches)
    tasks = [op for op, _ in order if op.kind in TASKS]
    others: list[tuple[DeviceQueue, Op]] = [((device, op.queue), op) for op, device in order if op.kind not in TASKS]
    placed_by_pattern = {op for _, op in others}
    if update_every is not None:
        tasks = list(_with_steps(tasks, micro_batches, update_every))
        placed_by_pattern |= {Op(j, "step") for j in range(len(devices))}
    rest = (entry for entry in with_messages([tasks], devices, transfers) if entry[1] not in placed_by_pattern)
    return Schedule(
        collect_queues(chain(rest, others)),
        tuple(devices),
        message_order=_messages_by_pair([op for _, op in others], devices),
    )


def _check_homes(pattern: Pattern, devices: Sequence[int]) -> None:
    for placed in pattern.ops:
        if placed.op.kind in TASKS and placed.device != devices[placed.op.stage]:
            home = devices[placed.op.stage]
            message = f"is on device {placed.device} in the pattern, its stage on device {home}"
            raise ProblemError(Problem(f"{placed.op} of stage {placed.op.stage}", None, message, hint=f"device {home}"))


def _in_time(pattern: Pattern, micro_batches: int) -> list[tuple[Op, int]]:
    """Returns all ops with their devices, in order of their start; the order is the same in every period."""
    timed = []
    for placed in pattern.ops:
        periods = math.floor(placed.start_s / pattern.period_s)
        start_s = placed.start_s - periods * pattern.period_s
        for i in range(micro_batches):
            timed.append((i + placed.shift + periods, start_s, i, replace(placed.op, micro_batch=i), placed.device))
    timed.sort(key=lambda entry: entry[:3])
    return [(op, device) for *_, op, device in timed]


def _messages_by_pair(messages: Sequence[Op], devices: Sequence[int]) -> tuple[tuple[Op, ...], ...]:
    """Groups the messages by pair of devices, both directions together."""
    of_pair: dict[frozenset[int], list[Op]] = {}
    for op in messages:
        if op.kind == "copy" and op.peer is not None:
            of_pair.setdefault(frozenset((devices[op.stage], devices[op.peer])), []).append(op)
    return tuple(map(tuple, of_pair.values()))


def _with_steps(tasks: Sequence[Op], micro_batches: int, update_every: int) -> Iterator[Op]:
    """Adds each step after the last task that adds to its gradients; raises ValueError below one micro-batch."""
    if update_every < 1:
        raise ValueError(f"update_every is {update_every}, must be at least 1")
    halved = {op.stage for op in tasks if op.kind == "W"}
    for op in tasks:
        yield op
        i = op.micro_batch
        assert i is not None
        if op.kind == ("W" if op.stage in halved else "B") and ((i + 1) % update_every == 0 or i + 1 == micro_batches):
            yield Op(op.stage, "step", i)
