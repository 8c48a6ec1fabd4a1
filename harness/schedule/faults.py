"""What is wrong with a schedule as data, before anything executes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from harness.op import Op
from harness.plan import Plan
from harness.schedule import LaneOps, Schedule
from harness.schedule.chunks import IN, OUT, way
from harness.schedule.circle import circle
from harness.schedule.graph import MESSAGES

Tasks = dict[tuple[int, int | None], Op]
"""Ops of one kind, by stage and micro-batch."""


def faults(schedule: Schedule, plan: Plan | None = None) -> list[str]:
    """A line for each fault, with the op, its stage and a mend; empty if all is well. Linear in the number of ops.

    Looked for: ops that stand twice, on a foreign device, or belong to no stage; tasks that miss their twin, their
    micro-batch or what they need; messages without another end; buckets that nobody updates; ops that wait for each
    other in a circle. With a `plan` its stages, devices and micro-batches are those that must be there. That the
    optimizer is missing is no fault.
    """
    stages = len(schedule.devices)
    lost = {op: fault for lane in schedule.lanes for op in lane.ops if (fault := _lost(op, stages))}
    if lost:
        kept = (replace(lane, ops=tuple(op for op in lane.ops if op not in lost)) for lane in schedule.lanes)
        schedule = replace(schedule, lanes=tuple(kept))
    twice = list(_doubled(schedule))
    found = [*_against(schedule, plan), *lost.values(), *twice, *_misplaced(schedule)]
    found += [*_unpaired(schedule, plan), *_unsent(schedule), *_not_updated(schedule)]
    return found if twice else [*found, *circle(schedule)]


def _name(op: Op) -> str:
    return f"{op} of stage {op.stage}"


def _where(lane: LaneOps) -> str:
    return f"device {lane.device} {lane.queue}"


def _lost(op: Op, stages: int) -> str | None:
    """An op of no stage, a task of no micro-batch, a message to nobody."""
    if not 0 <= op.stage < stages:
        return f"{_name(op)}   is of none of the {stages} stages   -> a stage of 0..{stages - 1}"
    if op.kind in ("F", "B", "R", "W") and op.micro_batch is None:
        return f"{_name(op)}   names no micro-batch   -> {op}0"
    if op.kind == "copy" and op.peer is None:
        return None  # to or from the host's memory
    if op.kind in MESSAGES and (op.peer is None or op.peer == op.stage or not 0 <= op.peer < stages):
        end = "names no other stage" if op.peer is None else f"has its other end on stage {op.peer}"
        return f"{_name(op)}   {end}   -> another one of the stages 0..{stages - 1}"
    return None


def _against(schedule: Schedule, plan: Plan | None) -> Iterator[str]:
    if schedule.limit is not None and schedule.limit < 1:
        yield f"limit {schedule.limit}   lets no micro-batch in   -> 1 or more"
    there = schedule.devices
    planned = tuple(stage.device for stage in plan.stages) if plan else there
    if len(planned) != len(there):
        yield f"mesh.pipeline {len(planned)}   the schedule has {len(there)} stages   -> mesh.pipeline={len(there)}"
    for j, (device, wanted) in enumerate(zip(there, planned, strict=False)):
        if device != wanted:
            yield f"stage {j}   is on device {device} in the schedule, on {wanted} in the plan   -> device {wanted}"


def _doubled(schedule: Schedule) -> Iterator[str]:
    """Only a copy may stand in two lanes: those of its two ends."""
    homes: dict[Op, LaneOps] = {}
    for lane in schedule.lanes:
        own = dict.fromkeys(lane.ops)
        if len(own) < len(lane.ops):
            for op, times in Counter(lane.ops).items():
                if times > 1:
                    yield f"{_name(op)}   stands {times} times in {_where(lane)}   -> once"
        for op in own:
            other = homes.setdefault(op, lane)
            if other is not lane and not (op.kind == "copy" and other.queue == lane.queue):
                yield f"{_name(op)}   stands in {_where(other)} and in {_where(lane)}   -> in one of them"


def _misplaced(schedule: Schedule) -> Iterator[str]:
    """Each op belongs to its stage's device; a copy in the compute queue occupies both ends' devices."""
    devices = schedule.devices
    held: dict[Op, set[int]] = {}
    for lane in schedule.lanes:
        for op in lane.ops:
            homes = {devices[op.stage]}
            if op.kind == "copy" and op.peer is not None and lane.queue == "compute":
                homes.add(devices[op.peer])
                held.setdefault(op, set()).add(lane.device)
            elif op.kind == "copy" and op.peer is not None and lane.queue == "copy out":
                homes = {devices[op.peer]}
            if lane.device not in homes:
                right = " or ".join(f"device {device}" for device in sorted(homes))
                yield f"{_name(op)}   stands in {_where(lane)}, but its stage is on {right}   -> {right}"
    for op, where in held.items():
        for device in {devices[op.stage], devices[op.peer or 0]} - where:
            yield f"{_name(op)}   does not stand at its other end, device {device} compute   -> add it there"


def _unpaired(schedule: Schedule, plan: Plan | None) -> Iterator[str]:
    """F without B, B or R without F, W without B, and micro-batches that not all stages work on."""
    tasks: dict[str, Tasks] = {"F": {}, "B": {}, "R": {}, "W": {}}
    for lane in schedule.lanes:
        for op in lane.ops:
            if op.kind in tasks:
                tasks[op.kind][op.stage, op.micro_batch] = op
    for kind, twin in (("F", "B"), ("B", "F"), ("R", "F"), ("W", "B")):
        for (j, i), op in tasks[kind].items():
            if (j, i) not in tasks[twin]:
                yield f"{_name(op)}   has no {j}{twin}{i}   -> add {j}{twin}{i}, or leave out {op}"
    there = {i for _, i in [*tasks["F"], *tasks["B"]] if i is not None}
    wanted = set(range(plan.micro_batches)) if plan else there
    for j in range(len(schedule.devices)):
        for i in sorted(wanted):
            if (j, i) not in tasks["F"] and (j, i) not in tasks["B"]:
                yield f"{j}F{i} and {j}B{i} of stage {j}   are missing   -> add micro-batch {i} to stage {j}"
    for i in sorted(there - wanted):
        yield f"micro-batch {i}   is none of the plan's {len(wanted)}   -> batch.micro_batches={max(there) + 1}"


def _unsent(schedule: Schedule) -> Iterator[str]:
    """Messages whose other end does nothing: a copy of what no task makes, a recv of what nobody sends."""
    made = {(op.stage, op.kind, op.micro_batch) for lane in schedule.lanes for op in lane.ops if op.kind in ("F", "B")}
    sent = (op for lane in schedule.lanes for op in lane.ops if op.kind in MESSAGES and op.peer is not None)
    messages = dict.fromkeys(sent)
    for op in messages:
        source = op.stage if op.kind == "send" else op.peer
        if (source, "F" if op.forward else "B", op.micro_batch) not in made:
            what = f"{source}{'F' if op.forward else 'B'}{op.micro_batch}"
            yield f"{_name(op)}   carries what {what} makes, which is missing   -> add {what}, or leave out {op}"
        if op.kind == "recv" and op.peer is not None:
            send = Op(op.peer, "send", op.micro_batch, op.part, op.stage)
            if send not in messages:
                yield f"{_name(op)}   has no {send}   -> add {send}, or leave out {op}"


def _not_updated(schedule: Schedule) -> Iterator[str]:
    """Buckets that visit a device without a step there, or go only one way."""
    every = (op for lane in schedule.lanes for op in lane.ops)
    ops = dict.fromkeys(op for op in every if op.kind == "step" or (op.kind == "copy" and op.peer is None))
    for op in ops:
        bucket, found = way(op)
        other = OUT if found == IN else IN
        needed = (Op(op.stage, "step", None, bucket), replace(op, part=f"{bucket}/{other}")) if bucket else ()
        for one in needed:
            if one not in ops:
                yield f"{_name(op)}   has no {one}   -> add {one}, or leave out {op}"
