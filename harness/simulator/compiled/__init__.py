"""The simulator for large schedules: the results of `harness.simulator`, to the last bit, from columns of numbers and a
compiled event loop.

    schedule -> columns -> edges -> lowering -> tables -> event_loop -> memory
                    a schedule that the columns do not know is lowered as a small one; the loop is the same

What small schedules go through is the reference: it is what to read, and what tests compare this with.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np

from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.op import COMPUTE, Op
from harness.core.plan import Plan
from harness.schedule import Schedule
from harness.simulator.compiled.alone import Alone
from harness.simulator.compiled.columns import Columns, columns
from harness.simulator.compiled.edges import has_edges
from harness.simulator.compiled.event_loop import execute
from harness.simulator.compiled.fullest import fullest
from harness.simulator.compiled.lowering import LoweredColumns
from harness.simulator.compiled.memory import peaks
from harness.simulator.compiled.tables import Numbers, Seconds, tables_of
from harness.simulator.event_loop import Work
from harness.simulator.lowering import sent_kind, shared_cores, slow_replicas
from harness.simulator.memory_timeline import Peak
from harness.simulator.op_durations import TaskCosts

__all__ = ["Alone", "Done", "simulated", "start", "times_of", "without_sharing"]


def start() -> None:
    """Makes the machine code, or reads it from its folder. Raises RuntimeError where numba compiles nothing by its
    settings, OSError, EOFError or UnpicklingError where the folder cannot be written or read."""
    if vars(numba.config)["DISABLE_JIT"]:
        raise RuntimeError("NUMBA_DISABLE_JIT is set")
    execute(tables_of(Work([0.0], [0], [[]]), [Op(0, "F", 0)]))
    nothing, none = np.zeros(0), np.zeros(0, dtype=np.int64)
    fullest(nothing, none, none, nothing, none, none, 1)


class Done(NamedTuple):
    """A simulated step, as `harness.simulator.Simulation` has it."""

    nodes: list[array[int]]
    start_s: array[float]
    end_s: array[float]
    figures: dict[str, Any]
    peaks: tuple[Peak, ...]


def simulated(
    schedule: Schedule,
    plan: Plan,
    profile: ModelProfile,
    cluster: Cluster,
    memory: MemoryModel,
    jitter: float,
    seed: int,
) -> list[Done] | None:
    """Simulates each replica with slow devices, or one; None where the columns do not know the schedule, or where it
    cannot end."""
    found = _columns(schedule, cluster)
    if found is None or (memory.freed and len(found.chunks.nodes)):
        return None
    costs = TaskCosts(plan, profile, cluster, memory, found.templates)
    done = []
    for slow in slow_replicas(schedule, cluster):
        lowered = LoweredColumns(schedule, found, cluster, costs, slow)
        tables = lowered.lower(shared_cores(schedule, cluster), cluster.blocking_messages, jitter, seed)
        start_s, end_s = execute(tables)
        if end_s.min() < 0:
            return None
        start_s += lowered.before_s
        filled = peaks(found, start_s, end_s, schedule, plan, profile, memory)
        figures = _figures(lowered, start_s, end_s, plan) | {"peak_memory_bytes": [peak.bytes for peak in filled]}
        nodes = [array("q", one.tobytes()) for one in found.queues]
        done.append(Done(nodes, array("d", start_s.tobytes()), array("d", end_s.tobytes()), figures, filled))
    return done


def _columns(schedule: Schedule, cluster: Cluster) -> Columns | None:
    """Returns the columns of a schedule; None where they, or its dependencies, are not known."""
    found = None if schedule.message_order else columns(schedule, cluster.blocking_messages or schedule.rendezvous)
    return found if found is not None and has_edges(found) else None


def without_sharing(
    schedule: Schedule, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel
) -> list[Alone] | None:
    """Executes each replica with slow devices, or one, as if each flow had its resources alone; None where the columns
    do not know the schedule."""
    found = _columns(schedule, cluster)
    if found is None:
        return None
    costs = TaskCosts(plan, profile, cluster, memory, found.templates)
    done = []
    for slow in slow_replicas(schedule, cluster):
        lowered = LoweredColumns(schedule, found, cluster, costs, slow)
        tables = lowered.lower(shared_cores(schedule, cluster), cluster.blocking_messages, 0.0, 0)
        seconds = lowered.alone_s()
        _, end_s = execute(tables.without_flows(seconds))
        done.append(Alone(found, tables, seconds, end_s))
    return done


def _figures(lowered: LoweredColumns, start_s: Seconds, end_s: Seconds, plan: Plan) -> dict[str, Any]:
    found, step_time_s = lowered.columns, float(end_s.max())
    computes = np.array([op.kind in COMPUTE for op in found.templates])
    busy_s = dict.fromkeys(plan.devices, 0.0)
    for queue, nodes in zip(lowered.schedule.queues, found.queues, strict=True):
        if queue.name == "compute":
            tasks = nodes[computes[found.template[nodes]]]
            busy_s[queue.device] += sum((end_s[tasks] - start_s[tasks]).tolist())  # in this order, as the reference
    utilization = [busy_s[device] / step_time_s if step_time_s else 0.0 for device in plan.devices]
    return {
        "step_time_s": step_time_s,
        "utilization": utilization,
        "bubble_fraction": 1 - sum(utilization) / len(utilization),
        "bytes_sent": _bytes_sent(found, lowered.schedule, lowered.members),
    }


def _bytes_sent(found: Columns, schedule: Schedule, members: Numbers) -> dict[str, int]:
    sent: dict[str, int] = {}
    entries = np.zeros(len(found.templates), dtype=np.int64)
    np.add.at(entries, found.template, members[: len(found.template)])
    for op, count in zip(found.templates, entries.tolist(), strict=True):
        kind = sent_kind(op, schedule.devices)
        if kind is not None and count:
            sent[kind] = sent.get(kind, 0) + op.bytes * count * schedule.replicas * schedule.tensor
    return dict(sorted(sent.items()))


def times_of(work: Work, ops: Sequence[Op]) -> tuple[list[float], list[float]]:
    """Returns when each node of lowered work starts and ends; -1 for one that never ran."""
    start_s, end_s = execute(tables_of(work, ops))
    return start_s.tolist(), end_s.tolist()
