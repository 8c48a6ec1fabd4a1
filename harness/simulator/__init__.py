"""The simulator: executes a schedule on a simulated cluster, and returns the trace and metrics of a real run.

    device 0 compute   0F0 0F1          0B1    0B0
    device 0 -> 1         0>1 0>1                        a message occupies its link, not the devices
    device 1 compute        1F0 1F1 1B1    1B0           1B1 waits for 1F1, 0B1 for 1B1

It is deterministic, and does not import torch. Schedules of many ops go through `harness.simulator.compiled`, which has
the same results.
"""

from __future__ import annotations

import gc
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pickle import UnpicklingError
from types import ModuleType
from typing import TYPE_CHECKING, Any

from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.op import COMPUTE, Op
from harness.core.plan import Plan
from harness.core.trace import Span, Trace
from harness.schedule import Schedule
from harness.simulator.event_loop import Execution, Work
from harness.simulator.lowering import LoweredSchedule, sent_kind, slow_replicas
from harness.simulator.memory_timeline import Peak, peaks
from harness.simulator.op_durations import TaskCosts

if TYPE_CHECKING:
    from harness.simulator.compiled.alone import Alone

__all__ = ["Deadlock", "Peak", "Simulation", "lower", "reference", "simulate", "without_sharing"]

START_OPS, LARGE_OPS = 60_000, 2_000
"""Schedules of at least `LARGE_OPS` ops are simulated by compiled code once it is loaded. It is when those that a
process has simulated have `START_OPS` together: numba takes 0.6 s to start, in which so many ops are simulated without
it. Where the machine code is not in numba's cache, after an installation or a change of it, it takes six seconds
more."""
Times = tuple[list[float], list[float]]
"""When each node starts and ends."""


class Deadlock(RuntimeError):
    """A schedule that cannot end: the message names, for each queue, which op waits for what."""


@dataclass
class Simulation:
    """One simulated step, which starts at 0 s. `peaks` are in the order of `plan.devices`.

    `figures`: `step_time_s`; for each of `plan.devices` `peak_memory_bytes` and `utilization`; `bubble_fraction`;
    `bytes_sent` by kind (activations, gradients, skips, skip_gradients, and collectives by their algorithm: the buffers
    of all members).
    """

    schedule: Schedule
    nodes: Sequence[Sequence[int]]
    start_s: Sequence[float]
    end_s: Sequence[float]
    figures: dict[str, Any]
    peaks: tuple[Peak, ...]

    @cached_property
    def trace(self) -> Trace:
        """The step as an engine would have recorded it, made on first use."""
        spans = tuple(
            Span(str(op), queue.device, queue.name, self.start_s[node], self.end_s[node])
            for queue, nodes in zip(self.schedule.queues, self.nodes, strict=True)
            for op, node in zip(queue.ops, nodes, strict=True)
        )
        return Trace(spans, ((0.0, self.figures["step_time_s"]),))


def simulate(
    schedule: Schedule,
    plan: Plan,
    profile: ModelProfile,
    cluster: Cluster,
    memory: MemoryModel,
    jitter: float = 0.0,
    seed: int = 0,
    durations: Mapping[str, float] | None = None,
) -> Simulation:
    """Executes one step of `schedule`.

    `jitter` is the relative spread of each op's time, drawn from `seed`. With `durations` (seconds by an op's notation)
    these replace all costs, and links are free: this replays a measured trace. Of replicas with slow devices
    (`cluster.slow`) the slowest one is returned: the others wait for it. Raises `Deadlock` where the schedule
    cannot end, ValueError where it is not valid (an op twice, or missing).
    """
    compiled = _compiled() if _pays(schedule) else None
    if compiled is None:
        return reference(schedule, plan, profile, cluster, memory, jitter, seed, durations)
    if durations is None:
        with no_collection():
            done = compiled.simulated(schedule, plan, profile, cluster, memory, jitter, seed)
        if done is not None:
            return Simulation(schedule, *max(done, key=lambda one: float(one.figures["step_time_s"])))
    return reference(schedule, plan, profile, cluster, memory, jitter, seed, durations, compiled.times_of)


def without_sharing(
    schedule: Schedule,
    plan: Plan,
    profile: ModelProfile,
    cluster: Cluster,
    memory: MemoryModel,
    times: int = 1,
) -> list[Alone] | None:
    """Executes one step as if nothing waited for resources that flows share, for each replica with slow devices, or for
    one. None where the schedule is not for compiled code: `lower` it. The caller has `times` as many ops."""
    compiled = _compiled() if _pays(schedule, times) else None
    return compiled.without_sharing(schedule, plan, profile, cluster, memory) if compiled else None


def times_of(work: Work, ops: Sequence[Op]) -> Times:
    """Returns when each node of `work` starts and ends; -1 for one that never ran. `ops` are those of its nodes."""
    done = Execution(work, ops).run()
    return done.start_s, done.end_s


def reference(
    schedule: Schedule,
    plan: Plan,
    profile: ModelProfile,
    cluster: Cluster,
    memory: MemoryModel,
    jitter: float = 0.0,
    seed: int = 0,
    durations: Mapping[str, float] | None = None,
    execute: Callable[[Work, Sequence[Op]], Times] = times_of,
) -> Simulation:
    """Does what `simulate` does, without compiled code but for an event loop that is given (`execute`)."""
    with no_collection():
        lowered = lower(schedule, plan, profile, cluster, memory, durations)
        found = [_executed(one, plan, profile, memory, jitter, seed, execute) for one in lowered]
    return max(found, key=lambda one: one.figures["step_time_s"])


_seen_ops = 0
"""Ops of the large schedules that this process has simulated."""


def _pays(schedule: Schedule, times: int = 1) -> bool:
    """Whether to simulate a schedule, and `times` as many ops, by compiled code."""
    global _seen_ops
    ops = sum(len(queue.ops) for queue in schedule.queues)
    _seen_ops += times * ops if ops >= LARGE_OPS else 0
    return ops >= LARGE_OPS and _seen_ops >= START_OPS


@cache
def _compiled() -> ModuleType | None:
    """Returns the package of compiled code; None where numba does not work, or cannot keep and read what it makes."""
    try:
        with _without_scipy():
            from harness.simulator import compiled

            compiled.start()
    except (ImportError, AttributeError, RuntimeError, OSError, EOFError, UnpicklingError):
        return None
    return compiled


@contextmanager
def _without_scipy() -> Iterator[None]:
    """Hides scipy, unless it is loaded: numba loads it, for matrix products that no code here has, in a third of its
    time."""
    if "scipy" in sys.modules:
        yield
        return
    sys.modules["scipy"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["scipy"]


@contextmanager
def no_collection() -> Iterator[None]:
    """Pauses garbage collection, around what makes many small objects of which none is garbage: the search for some
    would take half of the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _executed(
    lowered: LoweredSchedule,
    plan: Plan,
    profile: ModelProfile,
    memory: MemoryModel,
    jitter: float,
    seed: int,
    execute: Callable[[Work, Sequence[Op]], Times],
) -> Simulation:
    if jitter:
        lowered.disturb(jitter, seed)
    start_s, end_s = execute(lowered.work, lowered.graph.ops)
    if min(end_s) < 0:
        raise Deadlock("the schedule cannot continue:\n" + "\n".join(lowered.stuck(end_s)))
    for node, before_s in lowered.before_s.items():
        start_s[node] += before_s  # until then its device is idle
    schedule = lowered.schedule
    filled = peaks(lowered.graph, start_s, end_s, schedule, plan, profile, memory)
    figures = _figures(lowered, start_s, end_s, plan) | {"peak_memory_bytes": [peak.bytes for peak in filled]}
    return Simulation(schedule, lowered.graph.queues, start_s, end_s, figures, filled)


def lower(
    schedule: Schedule,
    plan: Plan,
    profile: ModelProfile,
    cluster: Cluster,
    memory: MemoryModel,
    durations: Mapping[str, float] | None = None,
) -> list[LoweredSchedule]:
    """Lowers a step to nodes with durations and resources: that of each replica with slow devices, else one that is
    like all. Raises ValueError for an invalid schedule."""
    costs = TaskCosts(plan, profile, cluster, memory, schedule.ops())
    return [LoweredSchedule(schedule, cluster, costs, durations, slow) for slow in slow_replicas(schedule, cluster)]


def _figures(lowered: LoweredSchedule, start_s: list[float], end_s: list[float], plan: Plan) -> dict[str, Any]:
    step_time_s = max(end_s)
    busy_s = dict.fromkeys(plan.devices, 0.0)
    for queue, nodes in lowered.queues():
        if queue.name == "compute":
            spans = (end_s[n] - start_s[n] for op, n in zip(queue.ops, nodes, strict=True) if op.kind in COMPUTE)
            busy_s[queue.device] += sum(spans)
    utilization = [busy_s[device] / step_time_s if step_time_s else 0.0 for device in plan.devices]
    return {
        "step_time_s": step_time_s,
        "utilization": utilization,
        "bubble_fraction": 1 - sum(utilization) / len(utilization),
        "bytes_sent": _bytes_sent(lowered),
    }


def _bytes_sent(lowered: LoweredSchedule) -> dict[str, int]:
    sent: dict[str, int] = defaultdict(int)
    for node, op in enumerate(lowered.graph.ops):
        kind = sent_kind(op, lowered.schedule.devices)
        if kind is not None:
            copies = lowered.schedule.replicas * lowered.schedule.tensor
            sent[kind] += op.bytes * len(lowered.members.get(node, (0,))) * copies
    return dict(sorted(sent.items()))
