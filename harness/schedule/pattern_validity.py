"""Checks that a periodic schedule (a pattern) can repeat for ever (MadPipe, section 4), by unrolling it.

period    |0     |1     |2     |3     |4     |5          three stages, three devices
device 0   0F0    0F1    0F2 0B0 0F3 0B1 0F4 0B2 ...     micro-batch 0 | steady state from period 2 on
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from harness.core.cluster import Duplex
from harness.core.op import Op
from harness.core.pattern import Pattern
from harness.core.problem import Problem
from harness.schedule import QueueOps, Schedule
from harness.schedule.builders.periodic import TASKS
from harness.schedule.validate import op_problem

ByNumber = Mapping[int, int] | Sequence[int]
"""Bytes of each stage or device."""
ROUNDING = 1e-9
"""In periods: how much too early an op may start, to allow for the rounding of floats."""


@dataclass(frozen=True, slots=True)
class Ran:
    """An op of one micro-batch, its `shift` in the pattern, and when it ran on `place`.

    `place` is (device,), or for a message (source device, target device).
    """

    op: Op
    shift: int
    place: tuple[int, ...]
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Replay:
    """A pattern unrolled until `periods` periods are in steady state, which contain every op.

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
        """Number of micro-batches from the first one to the one whose earliest op begins the last steady period."""
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
        runs = []
        for i in range(self.micro_batches):
            for placed in self.pattern.ops:
                start_s = placed.start_s + (i + placed.shift) * self.pattern.period_s
                op = replace(placed.op, micro_batch=i)
                end_s = start_s + self.durations[key(op)]
                runs.append(Ran(op, placed.shift, self.place(op, placed.device), start_s, end_s))
        return runs

    def place(self, op: Op, device: int) -> tuple[int, ...]:
        """Returns what an op occupies: (device,), or (source, target) of a message."""
        if op.peer is None:
            return (device,)
        ends = (self.homes[op.peer], self.homes[op.stage])
        return ends if op.kind != "send" else ends[::-1]

    def stored(self, stored: ByNumber, fixed: ByNumber) -> dict[int, list[tuple[float, int]]]:
        """Maps each device to (seconds, bytes from then on), in order of time. A stage stores `stored[stage]` bytes of
        each micro-batch from the start of F to the end of B (and of W, if that is later); `fixed[device]` are always
        allocated.

        What is freed at an instant is gone before what begins at the same instant.
        """
        slack = ROUNDING * self.pattern.period_s
        changes: dict[int, list[tuple[float, float, int]]] = defaultdict(list)
        ends = {(r.op.kind, r.op.stage, r.op.micro_batch): r.end_s for r in self.ran if r.op.kind in ("B", "W")}
        for r in self.ran:
            if r.op.kind == "F":
                micro_batch = r.op.stage, r.op.micro_batch
                end_s = max(end for kind in ("B", "W") if (end := ends.get((kind, *micro_batch))) is not None)
                changes[r.place[0]].append((r.start_s, r.start_s, stored[r.op.stage]))
                changes[r.place[0]].append((end_s - slack, end_s, -stored[r.op.stage]))
        curves = {}
        for device, of_device in sorted(changes.items()):
            held, curve = fixed[device], []
            for _, at_s, change in sorted(of_device, key=lambda entry: (entry[0], entry[2])):
                held += change
                curve.append((at_s, held))
            curves[device] = curve
        return curves


def key(op: Op) -> str:
    """Returns the notation of an op in `durations`: that of micro-batch 0."""
    return str(replace(op, micro_batch=0))


def replay_pattern(pattern: Pattern, durations: Mapping[str, float]) -> Replay:
    """Unrolls a pattern for 3 (2P - 1) periods of steady state, with P devices."""
    devices = {placed.device for placed in pattern.ops if placed.op.kind in TASKS}
    return Replay(pattern, durations, 3 * (2 * len(devices) - 1))


def peak_bytes(pattern: Pattern, durations: Mapping[str, float], stored: ByNumber, fixed: ByNumber) -> dict[int, int]:
    """Returns the peak bytes of each device, for a pattern with F and B of each stage. See `Replay.stored`."""
    curves = replay_pattern(pattern, durations).stored(stored, fixed)
    return {device: max(held for _, held in curve) for device, curve in curves.items()}


def pattern_errors(
    pattern: Pattern,
    durations: Mapping[str, float],
    stored: ByNumber,
    fixed: ByNumber,
    limits: ByNumber | int,
    duplex: Duplex,
) -> list[Problem]:
    """Checks a pattern; returns a problem for each fault, with op, stage, both numbers and a hint.

    The pattern is unrolled for 3 (2P - 1) periods of steady state and all that comes before. It finds ops that are
    listed twice or are missing (each of `durations`, F and B of each stage, the messages between neighbours on two
    devices), a stage on two devices; an op that starts before what its micro-batch needs has ended; two ops at once on
    one device or link; a device that holds more than its limit. `durations` are seconds by the notation of ops with
    micro-batch 0, `stored` bytes by stage, `fixed` by device, `limits` by device, or one for all. A link is that of two
    devices in one direction, with `duplex` "half" in both. Times are compared with a tolerance of `ROUNDING` periods,
    bytes with none.
    """
    problems = list(_misplaced(pattern, durations))
    if problems:
        return problems
    replay = replay_pattern(pattern, durations)
    return [*_overlaps(replay, duplex), *_early(replay), *_overfull(replay, stored, fixed, limits)]


def _homes(pattern: Pattern) -> dict[int, int]:
    """Maps each stage to the device of its first task."""
    return {placed.op.stage: placed.device for placed in reversed(pattern.ops) if placed.op.kind in TASKS}


def _misplaced(pattern: Pattern, durations: Mapping[str, float]) -> Iterator[Problem]:
    """Yields what keeps the pattern from being unrolled."""
    ops = [replace(placed.op, micro_batch=0) for placed in pattern.ops]
    homes = _homes(pattern)
    for op in dict.fromkeys(ops):
        if ops.count(op) > 1:
            yield op_problem(op, f"stands {ops.count(op)} times in the pattern", "once")
        if str(op) not in durations:
            yield op_problem(op, "has no duration", "one for each op of the pattern")
        elif not (math.isfinite(durations[str(op)]) and durations[str(op)] >= 0):
            yield op_problem(op, f"takes {durations[str(op)]} s", "a finite number of at least 0")
    required = [replace(Op.parse(text), micro_batch=0) for text in durations]
    for op in dict.fromkeys([*_needed(homes, 1 + max((op.stage for op in ops), default=0)), *required]):
        if op not in ops:
            yield op_problem(op, "is not in the pattern, every micro-batch needs it", "add it")
    for placed in pattern.ops:
        op = replace(placed.op, micro_batch=0)
        if op.kind in TASKS and placed.device != homes[op.stage]:
            home = homes[op.stage]
            yield op_problem(op, f"is on device {placed.device}, its stage on device {home}", f"device {home}")
        if op.peer is not None and op.peer not in homes:
            yield op_problem(op, f"has its other end on stage {op.peer}, which has no task", "another one")


def _needed(homes: Mapping[int, int], stages: int) -> Iterator[Op]:
    """Yields F and B of each stage, and a message and its gradient between neighbours on two devices."""
    for j in range(stages):
        yield from (Op(j, "F", 0), Op(j, "B", 0))
    for j in range(1, stages):
        if j - 1 in homes and j in homes and homes[j - 1] != homes[j]:
            yield from (Op(j, "copy", 0, "", j - 1), Op(j - 1, "copy", 0, "", j))


def _overlaps(replay: Replay, duplex: Duplex) -> Iterator[Problem]:
    """Yields ops that begin on a device or link while another one runs there; each pair once, where it first occurs."""
    period = replay.pattern.period_s
    slack = ROUNDING * period
    used: dict[tuple[int, ...], list[Ran]] = defaultdict(list)
    for r in replay.ran:
        used[tuple(sorted(r.place)) if duplex == "half" else r.place].append(r)
    for place, runs in used.items():
        arrow = " -- " if duplex == "half" else " -> "
        where = f"device {place[0]}" if len(place) == 1 else f"link {arrow.join(map(str, place))}"
        runs.sort(key=lambda r: (r.start_s, r.end_s))
        reported: set[frozenset[str]] = set()
        holder = runs[0]
        for r in runs[1:]:
            pair = frozenset((key(r.op), key(holder.op)))
            if r.start_s < holder.end_s - slack and pair not in reported:
                reported.add(pair)
                if len(pair) == 1:
                    took = holder.end_s - holder.start_s
                    message = f"takes {took:g} s, the period is {period:g} s"
                    yield op_problem(r.op, message, "a longer period", took_s=took, period_s=period)
                else:
                    message = f"starts at {r.start_s:g} s, {holder.op} is on {where} until {holder.end_s:g} s"
                    hint = "a longer period, or another start"
                    yield op_problem(r.op, message, hint, start_s=r.start_s, until_s=holder.end_s)
            holder = r if r.end_s > holder.end_s else holder


def _early(replay: Replay) -> Iterator[Problem]:
    """Yields ops that start before their input is complete; each pair of op and dependency once."""
    period = replay.pattern.period_s
    run_of = {r.op: r for r in replay.ran}
    reported: set[tuple[str, str]] = set()
    devices = tuple(range(1 + max(op.stage for op in run_of)))
    for op, before in Schedule((QueueOps(0, "network", tuple(run_of)),), devices).dependencies().items():
        r = run_of[op]
        for dependency in before:
            late_s = run_of[dependency].end_s - r.start_s
            if late_s > ROUNDING * period and (key(op), key(dependency)) not in reported:
                reported.add((key(op), key(dependency)))
                ready_s = run_of[dependency].end_s
                message = f"starts at {r.start_s:g} s, {dependency} of its micro-batch ends at {ready_s:g} s"
                hint = f"shift {r.shift + math.ceil(late_s / period - ROUNDING)}"
                yield op_problem(op, message, hint, start_s=r.start_s, ready_s=ready_s)


def _overfull(replay: Replay, stored: ByNumber, fixed: ByNumber, limits: ByNumber | int) -> Iterator[Problem]:
    """Yields devices that hold more than their limit, at their first peak."""
    for device, curve in replay.stored(stored, fixed).items():
        limit = limits if isinstance(limits, int) else limits[device]
        at_s, held = max(curve, key=lambda point: point[1])
        if held > limit:
            always = f"{fixed[device]:,} of them all the time"
            message = f"holds {held:,} bytes at {at_s:g} s, {always}, its limit is {limit:,}"
            numbers: dict[str, float] = {"needed_bytes": held, "available_bytes": limit}
            hint = "a longer period, or other stages on it"
            yield Problem(f"device {device}", None, message, hint=hint, numbers=numbers)
