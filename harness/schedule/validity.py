"""Whether a pattern can be repeated for ever (MadPipe, section 4): it is unrolled, and every moment is looked at.

period    |0     |1     |2     |3     |4     |5          three stages, three devices
device 0   0F0    0F1    0F2 0B0 0F3 0B1 0F4 0B2 ...     micro-batch 0 | steady state from period 2 on
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from harness.cluster import Duplex
from harness.op import Op
from harness.pattern import Pattern
from harness.schedule import LaneOps, Schedule
from harness.schedule.periodic import TASKS

ByNumber = Mapping[int, int] | Sequence[int]
"""Bytes of each stage or device."""
ROUNDING = 1e-9
"""In periods: by so much a start may come too early. Sums of floats are no more exact than this."""


@dataclass(frozen=True, slots=True)
class Ran:
    """An op of one micro-batch, the `shift` of it in the pattern, and from when to when it ran on `place`.

    `place` is (device,), or for a message (source device, target device).
    """

    op: Op
    shift: int
    place: tuple[int, ...]
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Replay:
    """A pattern unrolled so far that `periods` periods are in steady state: everything that ever runs runs in them.

    `durations` are seconds by the notation of the op with micro-batch 0 ("2F0", "3copy0<2"). Raises KeyError for an op
    that has none, and for a message of a stage without tasks.
    """

    pattern: Pattern
    durations: Mapping[str, float]
    periods: int

    @cached_property
    def homes(self) -> dict[int, int]:
        """The device of each stage."""
        return _homes(self.pattern)

    @cached_property
    def steady(self) -> int:
        """The period in which the steady state begins: the slowest op of micro-batch 0 ends before it."""
        return max(math.ceil(end - ROUNDING) for _, end in self._reach)

    @cached_property
    def micro_batches(self) -> int:
        """From the first micro-batch to the one whose earliest op begins the last steady period."""
        return self.steady + self.periods - min(math.floor(start) for start, _ in self._reach)

    @cached_property
    def _reach(self) -> list[tuple[float, float]]:
        """Start and end of each op of micro-batch 0, in periods."""
        period = self.pattern.period_s
        starts = [placed.start_s / period + placed.shift for placed in self.pattern.ops]
        return [(s, s + self.durations[key(p.op)] / period) for s, p in zip(starts, self.pattern.ops, strict=True)]

    @cached_property
    def ran(self) -> list[Ran]:
        """All ops of all micro-batches; those of one micro-batch in the pattern's order."""
        found = []
        for i in range(self.micro_batches):
            for placed in self.pattern.ops:
                start_s = placed.start_s + (i + placed.shift) * self.pattern.period_s
                op = replace(placed.op, micro_batch=i)
                end_s = start_s + self.durations[key(op)]
                found.append(Ran(op, placed.shift, self.place(op, placed.device), start_s, end_s))
        return found

    def place(self, op: Op, device: int) -> tuple[int, ...]:
        """What an op occupies."""
        if op.peer is None:
            return (device,)
        ends = (self.homes[op.peer], self.homes[op.stage])
        return ends if op.kind != "send" else ends[::-1]

    def stored(self, stored: ByNumber, fixed: ByNumber) -> dict[int, list[tuple[float, int]]]:
        """For each device (when, bytes from then on), in order of time. A stage stores `stored[stage]` bytes of each
        micro-batch from the start of F to the end of B (and of W, if that is later); `fixed[device]` are always there.

        What is freed at an instant is gone before what begins then.
        """
        slack = ROUNDING * self.pattern.period_s
        changes: dict[int, list[tuple[float, float, int]]] = defaultdict(list)
        ends = {(r.op.kind, r.op.stage, r.op.micro_batch): r.end_s for r in self.ran if r.op.kind in ("B", "W")}
        for r in self.ran:
            if r.op.kind == "F":
                own = r.op.stage, r.op.micro_batch
                end_s = max(end for kind in ("B", "W") if (end := ends.get((kind, *own))) is not None)
                changes[r.place[0]].append((r.start_s, r.start_s, stored[r.op.stage]))
                changes[r.place[0]].append((end_s - slack, end_s, -stored[r.op.stage]))
        found = {}
        for device, own_changes in sorted(changes.items()):
            held, curve = fixed[device], []
            for _, at_s, change in sorted(own_changes, key=lambda entry: (entry[0], entry[2])):
                held += change
                curve.append((at_s, held))
            found[device] = curve
        return found


def key(op: Op) -> str:
    """The notation by which an op's duration is known."""
    return str(replace(op, micro_batch=0))


def replayed(pattern: Pattern, durations: Mapping[str, float]) -> Replay:
    """Unrolled for 3 (2P - 1) periods of steady state, P being the number of devices."""
    devices = {placed.device for placed in pattern.ops if placed.op.kind in TASKS}
    return Replay(pattern, durations, 3 * (2 * len(devices) - 1))


def peak_bytes(pattern: Pattern, durations: Mapping[str, float], stored: ByNumber, fixed: ByNumber) -> dict[int, int]:
    """Bytes of each device at its fullest moment, of a pattern with F and B of each stage. See `Replay.stored`."""
    curves = replayed(pattern, durations).stored(stored, fixed)
    return {device: max(held for _, held in curve) for device, curve in curves.items()}


def faults_of(
    pattern: Pattern,
    durations: Mapping[str, float],
    stored: ByNumber,
    fixed: ByNumber,
    limits: ByNumber | int,
    duplex: Duplex,
) -> list[str]:
    """A line for each fault of a pattern, with op, stage, both numbers and a mend; empty if it is valid.

    The pattern is unrolled for 3 (2P - 1) periods of steady state and all that comes before. Looked for: ops that stand
    twice or are missing (each of `durations`, F and B of each stage, the messages between neighbours on two devices),
    a stage on two devices; an op that starts before what its micro-batch needs has ended; two ops at once on one device
    or link; a device that holds more than its limit. `durations` are seconds by the notation of ops with micro-batch 0,
    `stored` bytes by stage, `fixed` by device, `limits` by device, or one for all. A link is that of two devices in one
    direction, with `duplex` "half" in both. Times are compared with a tolerance of `ROUNDING` periods, bytes with none.
    """
    found = list(_misplaced(pattern, durations))
    if found:
        return found
    replay = replayed(pattern, durations)
    return [*_overlaps(replay, duplex), *_early(replay), *_overfull(replay, stored, fixed, limits)]


def _homes(pattern: Pattern) -> dict[int, int]:
    """The device of each stage: that of its first task."""
    return {placed.op.stage: placed.device for placed in reversed(pattern.ops) if placed.op.kind in TASKS}


def _name(op: Op) -> str:
    return f"{op} of stage {op.stage}"


def _misplaced(pattern: Pattern, durations: Mapping[str, float]) -> Iterator[str]:
    """What cannot even be unrolled."""
    ops = [replace(placed.op, micro_batch=0) for placed in pattern.ops]
    homes = _homes(pattern)
    for op in dict.fromkeys(ops):
        if ops.count(op) > 1:
            yield f"{_name(op)}   stands {ops.count(op)} times in the pattern   -> once"
        if str(op) not in durations:
            yield f"{_name(op)}   has no duration   -> one for each op of the pattern"
        elif not (math.isfinite(durations[str(op)]) and durations[str(op)] >= 0):
            yield f"{_name(op)}   takes {durations[str(op)]} s   -> a finite number of at least 0"
    asked = [replace(Op.parse(text), micro_batch=0) for text in durations]
    for op in dict.fromkeys([*_needed(homes, 1 + max((op.stage for op in ops), default=0)), *asked]):
        if op not in ops:
            yield f"{_name(op)}   is not in the pattern, every micro-batch needs it   -> add it"
    for placed in pattern.ops:
        op = replace(placed.op, micro_batch=0)
        if op.kind in TASKS and placed.device != homes[op.stage]:
            home = homes[op.stage]
            yield f"{_name(op)}   is on device {placed.device}, its stage on device {home}   -> device {home}"
        if op.peer is not None and op.peer not in homes:
            yield f"{_name(op)}   has its other end on stage {op.peer}, which has no task   -> another one"


def _needed(homes: Mapping[int, int], stages: int) -> Iterator[Op]:
    """F and B of each stage; a message and its gradient between neighbours on two devices."""
    for j in range(stages):
        yield from (Op(j, "F", 0), Op(j, "B", 0))
    for j in range(1, stages):
        if j - 1 in homes and j in homes and homes[j - 1] != homes[j]:
            yield from (Op(j, "copy", 0, "", j - 1), Op(j - 1, "copy", 0, "", j))


def _overlaps(replay: Replay, duplex: Duplex) -> Iterator[str]:
    """Who begins while another one is there, if only for a moment. Each pair is told once, at its first meeting."""
    period = replay.pattern.period_s
    slack = ROUNDING * period
    used: dict[tuple[int, ...], list[Ran]] = defaultdict(list)
    for r in replay.ran:
        used[tuple(sorted(r.place)) if duplex == "half" else r.place].append(r)
    for place, runs in used.items():
        arrow = " -- " if duplex == "half" else " -> "
        where = f"device {place[0]}" if len(place) == 1 else f"link {arrow.join(map(str, place))}"
        runs.sort(key=lambda r: (r.start_s, r.end_s))
        told: set[frozenset[str]] = set()
        holder = runs[0]
        for r in runs[1:]:
            pair = frozenset((key(r.op), key(holder.op)))
            if r.start_s < holder.end_s - slack and pair not in told:
                told.add(pair)
                if len(pair) == 1:
                    took = holder.end_s - holder.start_s
                    yield f"{_name(r.op)}   takes {took:g} s, the period is {period:g} s   -> a longer period"
                else:
                    yield (
                        f"{_name(r.op)}   starts at {r.start_s:g} s, {holder.op} is on {where} until {holder.end_s:g} s"
                        "   -> a longer period, or another start"
                    )
            holder = r if r.end_s > holder.end_s else holder


def _early(replay: Replay) -> Iterator[str]:
    """What starts before its own micro-batch is there. Each op and what it waits for is told once."""
    period = replay.pattern.period_s
    own = {r.op: r for r in replay.ran}
    told: set[tuple[str, str]] = set()
    devices = tuple(range(1 + max(op.stage for op in own)))
    for op, before in Schedule((LaneOps(0, "network", tuple(own)),), devices).dependencies().items():
        r = own[op]
        for one in before:
            late_s = own[one].end_s - r.start_s
            if late_s > ROUNDING * period and (key(op), key(one)) not in told:
                told.add((key(op), key(one)))
                yield (
                    f"{_name(op)}   starts at {r.start_s:g} s, {one} of its micro-batch ends at {own[one].end_s:g} s"
                    f"   -> shift {r.shift + math.ceil(late_s / period - ROUNDING)}"
                )


def _overfull(replay: Replay, stored: ByNumber, fixed: ByNumber, limits: ByNumber | int) -> Iterator[str]:
    """Devices that hold more than they have, at their first fullest moment."""
    for device, curve in replay.stored(stored, fixed).items():
        limit = limits if isinstance(limits, int) else limits[device]
        at_s, held = max(curve, key=lambda point: point[1])
        if held > limit:
            yield (
                f"device {device}   holds {held:,} bytes at {at_s:g} s, {fixed[device]:,} of them all the time, its "
                f"limit is {limit:,}   -> a longer period, or other stages on it"
            )
