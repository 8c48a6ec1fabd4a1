"""The simulator: executes a schedule on a described cluster; yields the trace and the figures that a real run gives.

    device 0 compute   0F0 0F1          0B1    0B0
    device 0 -> 1         0>1 0>1                        a message occupies its link, not the devices
    device 1 compute        1F0 1F1 1B1    1B0           1B1 waits for 1F1, 0B1 for 1B1

It is deterministic, and free of torch.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from harness.cluster import Cluster
from harness.memory import MemoryModel
from harness.op import COMPUTE
from harness.plan import Plan
from harness.profile import ModelProfile
from harness.schedule import Schedule
from harness.simulate.assembly import Assembly, sent_kind
from harness.simulate.costs import Costs
from harness.simulate.execution import Execution
from harness.simulate.ledger import Peak, peaks
from harness.trace import Span, Trace

__all__ = ["Deadlock", "Peak", "Simulation", "assembled", "simulate"]


class Deadlock(RuntimeError):
    """A schedule that cannot go on: the message names, for each queue, which op waits for what."""


@dataclass
class Simulation:
    """One simulated step, from 0. `peaks` in the order of `plan.devices`.

    `figures`: `step_time_s`; for each of `plan.devices` `peak_memory_bytes` and `utilization`; `bubble_fraction`;
    `bytes_sent` by kind (activations, gradients, skips, skip_gradients, and collectives by their algorithm: the buffers
    of all members).
    """

    schedule: Schedule
    nodes: list[list[int]]
    start_s: list[float]
    end_s: list[float]
    figures: dict[str, Any]
    peaks: tuple[Peak, ...]

    @cached_property
    def trace(self) -> Trace:
        """The step as an engine would have recorded it; made when it is asked for."""
        spans = tuple(
            Span(str(op), lane.device, lane.queue, self.start_s[node], self.end_s[node])
            for lane, nodes in zip(self.schedule.lanes, self.nodes, strict=True)
            for op, node in zip(lane.ops, nodes, strict=True)
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
    """Execute one step of `schedule`.

    `jitter` is the relative spread of each op's time, drawn from `seed`. With `durations` (seconds by an op's notation)
    these are taken instead of all costs, and links are free: it is how a measured trace is replayed. Raises `Deadlock`
    where the schedule cannot end, ValueError where it is none (an op twice, or missing).
    """
    with _no_collection():
        return _simulated(schedule, plan, profile, cluster, memory, jitter, seed, durations)


@contextmanager
def _no_collection() -> Iterator[None]:
    """None of the very many small objects is garbage: to look for cycles in them would take half of the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _simulated(
    schedule: Schedule, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, jitter: float,
    seed: int, durations: Mapping[str, float] | None,
) -> Simulation:  # fmt: skip
    assembly = assembled(schedule, plan, profile, cluster, memory, durations)
    if jitter:
        assembly.disturb(jitter, seed)
    done = Execution(assembly.work, assembly.graph.ops).run()
    if min(done.end_s) < 0:
        raise Deadlock("the schedule cannot go on:\n" + "\n".join(assembly.stuck(done.end_s)))
    filled = peaks(assembly.graph, done.start_s, done.end_s, schedule, plan, profile, memory)
    figures = _figures(assembly, done, plan) | {"peak_memory_bytes": [peak.bytes for peak in filled]}
    return Simulation(schedule, assembly.graph.lanes, done.start_s, done.end_s, figures, filled)


def assembled(
    schedule: Schedule, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel,
    durations: Mapping[str, float] | None = None,
) -> Assembly:  # fmt: skip
    """The work of a step, with what each part of it takes. Raises ValueError for a schedule that is none."""
    halved = any(op.kind == "W" for lane in schedule.lanes for op in lane.ops)
    return Assembly(schedule, cluster, Costs(plan, profile, cluster, memory, halved), durations)


def _figures(assembly: Assembly, done: Execution, plan: Plan) -> dict[str, Any]:
    step_time_s = max(done.end_s)
    busy_s = dict.fromkeys(plan.devices, 0.0)
    for lane, nodes in assembly.lanes():
        if lane.queue == "compute":
            spans = (
                done.end_s[n] - done.start_s[n] for op, n in zip(lane.ops, nodes, strict=True) if op.kind in COMPUTE
            )
            busy_s[lane.device] += sum(spans)
    utilization = [busy_s[device] / step_time_s if step_time_s else 0.0 for device in plan.devices]
    return {
        "step_time_s": step_time_s,
        "utilization": utilization,
        "bubble_fraction": 1 - sum(utilization) / len(utilization),
        "bytes_sent": _bytes_sent(assembly),
    }


def _bytes_sent(assembly: Assembly) -> dict[str, int]:
    sent: dict[str, int] = defaultdict(int)
    for node, op in enumerate(assembly.graph.ops):
        kind = sent_kind(op, assembly.schedule.devices)
        if kind is not None:
            alike = assembly.schedule.replicas * assembly.schedule.tensor
            sent[kind] += op.bytes * len(assembly.members.get(node, (0,))) * alike
    return dict(sorted(sent.items()))
