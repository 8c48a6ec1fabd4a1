"""Periodic schedules (MadPipe, section 4): a pattern, unrolled over a step, and what is wrong with one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Literal

from harness.op import Op
from harness.pattern import Pattern
from harness.schedule import LaneOps, Schedule, lanes_of
from harness.schedule.hops import Hop
from harness.schedule.messages import with_messages
from harness.trace import Lane

TASKS = ("F", "B", "W", "R")
ROUNDING = 1e-9
"""In periods: what may be missing to fit."""


def unrolled(pattern: Pattern, micro_batches: int, devices: Sequence[int], hops: Sequence[Hop]) -> Schedule:
    """Every device runs its ops in the order in which the pattern starts them: `start_s` + (i + shift) * period.

    period    |   0   |   1   |   2   |   3        two stages: 0F, 1F and 1B with shift 0, 0B with shift 1
    device 0   0F0     0F1 0B0 0F2 0B1     0B2
    device 1     1F0 1B0 1F1 1B1 1F2 1B2

    Only the order is kept, not the idle time: ops start as early as they can. Messages are those that the pattern
    places; each other one of `hops` leaves as soon as it can. The optimizer ends the step. `devices[j]` is the device
    of stage j; raises ValueError where the pattern places a task of it elsewhere.
    """
    for placed in pattern.ops:
        if placed.op.kind in TASKS and placed.device != devices[placed.op.stage]:
            raise ValueError(
                f"{placed.op} of stage {placed.op.stage}   is on device {placed.device} in the pattern, its stage on "
                f"device {devices[placed.op.stage]}   -> device {devices[placed.op.stage]}"
            )
    timed = [
        (placed.start_s + (i + placed.shift) * pattern.period_s, i, replace(placed.op, micro_batch=i), placed.device)
        for placed in pattern.ops
        for i in range(micro_batches)
    ]
    timed.sort(key=lambda entry: entry[:2])
    tasks = [op for _, _, op, _ in timed if op.kind in TASKS]
    others: list[tuple[Lane, Op]] = [((device, op.queue), op) for _, _, op, device in timed if op.kind not in TASKS]
    own = {op for _, op in others}
    rest = (entry for entry in with_messages([tasks], devices, hops) if entry[1] not in own)
    return Schedule(lanes_of(chain(rest, others)), tuple(devices))


def pattern_faults(
    pattern: Pattern, durations: Mapping[str, float], duplex: Literal["full", "half"] = "full"
) -> list[str]:
    """A line for each fault of a pattern, with the ops and a mend; empty if it can be repeated for ever.

    `durations` are seconds by the notation of the pattern's ops. Looked for: an op that is longer than the period, two
    ops of one device or link that overlap (modulo the period), an op that starts before what it waits for has ended.
    A link is that of two devices in one direction, with `duplex` "half" in both.
    """
    ops = [replace(placed.op, micro_batch=0) for placed in pattern.ops]
    found = [f"{op} of stage {op.stage}   stands twice in the pattern   -> once" for op in _repeated(ops)]
    missing = [placed.op for placed in pattern.ops if str(placed.op) not in durations]
    found += [f"{op} of stage {op.stage}   has no duration   -> one for each op of the pattern" for op in missing]
    if found:
        return found
    seconds = [durations[str(placed.op)] for placed in pattern.ops]
    return [*_overlaps(pattern, seconds, duplex), *_early(pattern, ops, seconds)]


def _repeated(ops: Sequence[Op]) -> list[Op]:
    return [op for place, op in enumerate(ops) if op in ops[:place]]


def _resources(pattern: Pattern, duplex: str) -> Iterator[tuple[object, str]]:
    """For each op what it occupies, and its name."""
    home = {placed.op.stage: placed.device for placed in pattern.ops if placed.op.kind in TASKS}
    for placed in pattern.ops:
        op = placed.op
        if op.peer is None:
            yield (placed.device, op.queue), f"device {placed.device} {op.queue}"
        else:
            ends = (home.get(op.peer, -1 - op.peer), home.get(op.stage, -1 - op.stage))
            ends = (min(ends), max(ends)) if duplex == "half" else ends
            arrow = "--" if duplex == "half" else "->"
            yield ("link", *ends), f"link {ends[0]} {arrow} {ends[1]}"


def _overlaps(pattern: Pattern, seconds: Sequence[float], duplex: str) -> Iterator[str]:
    """
    modulo the period   |==2F==|     |===1B===|          what reaches over the end of a period
                        |=B===|           |===2B         comes back at the beginning of the next one
    """
    period = pattern.period_s
    slack = ROUNDING * period
    used: dict[tuple[object, str], list[tuple[float, float, Op]]] = {}
    for placed, time, resource in zip(pattern.ops, seconds, _resources(pattern, duplex), strict=True):
        op, start = placed.op, placed.start_s % period
        if time > period + slack:
            yield f"{op} of stage {op.stage}   takes {time:g} s, the period is {period:g} s   -> a longer period"
        if time > 0:
            used.setdefault(resource, []).append((start, start + time, op))
    for (_, name), once in used.items():
        once.sort(key=lambda interval: interval[:2])
        pairs: dict[frozenset[Op], str] = {}
        reached, holder = float("-inf"), once[0][2]
        for start, end, op in once + [(start + period, end + period, op) for start, end, op in once]:
            if start < reached - slack and op != holder:
                line = f"{op} of stage {op.stage}   overlaps {holder} on {name}   -> a longer period, or another start"
                pairs.setdefault(frozenset((op, holder)), line)
            if end > reached:
                reached, holder = end, op
        yield from pairs.values()


def _early(pattern: Pattern, ops: Sequence[Op], seconds: Sequence[float]) -> Iterator[str]:
    """What starts before its own micro-batch is there."""
    period = pattern.period_s
    start_s = {op: p.start_s + p.shift * period for op, p in zip(ops, pattern.ops, strict=True)}
    end_s = {op: start_s[op] + time for op, time in zip(ops, seconds, strict=True)}
    shift = {op: placed.shift for op, placed in zip(ops, pattern.ops, strict=True)}
    stages = 1 + max((op.stage for op in ops), default=0)
    for op, before in Schedule((LaneOps(0, "network", tuple(ops)),), tuple(range(stages))).dependencies().items():
        for earlier in before:
            late = (end_s[earlier] - start_s[op]) / period
            if late > ROUNDING:
                yield (
                    f"{op} of stage {op.stage}   starts {late * period:g} s before {earlier} of its micro-batch has "
                    f"ended   -> shift {shift[op] + math.ceil(late - ROUNDING)}"
                )
