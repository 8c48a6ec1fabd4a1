"""Whether a trace keeps to its schedule."""

from __future__ import annotations

from itertools import pairwise

from harness.core.trace import Trace
from harness.schedule import Schedule
from harness.schedule.dependency_graph import sender


def violations(schedule: Schedule, trace: Trace, tolerance_s: float = 0.0) -> list[str]:
    """Lists where a trace of one step differs from what its schedule allows or demands; empty if it matches."""
    queues = trace.queues()
    errors = []
    for queue in schedule.queues:
        where = f"device {queue.device} {queue.name}"
        spans = queues.pop((queue.device, queue.name), [])
        ran, scheduled = [span.op for span in spans], [str(op) for op in queue.ops]
        any_order = queue.rule != "in_order" or queue.name == "network"
        if (sorted(ran) != sorted(scheduled)) if any_order else (ran != scheduled):
            errors.append(f"{where}: the schedule has {' '.join(scheduled)}, ran {' '.join(ran)}")
        for earlier_span, following in pairwise(spans if queue.name != "network" else ()):
            if following.start_s < earlier_span.end_s - tolerance_s:
                errors.append(f"{where}: {following.op} started before {earlier_span.op} had ended")
    errors += [f"device {queue[0]} {queue[1]} is not a queue of the schedule" for queue in queues]
    start: dict[str, float] = {}
    end: dict[str, float] = {}
    for span in trace.spans:
        start[span.op] = min(start.get(span.op, float("inf")), span.start_s)
        end[span.op] = max(end.get(span.op, float("-inf")), span.end_s)
    members = {
        (op.micro_batch, op.part, queue.device): str(op)
        for queue in schedule.queues
        for op in queue.ops
        if op.kind == "collective"
    }
    for op, before in schedule.dependencies().items():
        for dependency in before:
            place = (dependency.micro_batch, dependency.part, schedule.devices[op.stage])
            name = members.get(place, str(dependency))  # each member of a collective sees its own end
            if schedule.rendezvous and dependency.kind == "send":
                continue  # the recv, in the queue of the task that needs it, records when it arrived
            if str(op) in start and name in end and start[str(op)] < end[name] - tolerance_s:
                errors.append(f"{op} started before {dependency} had ended")
    for op in schedule.ops() if schedule.rendezvous else ():
        if op.kind == "recv" and end.get(str(op), 0.0) < start.get(str(sender(op)), float("-inf")) - tolerance_s:
            errors.append(f"{op} had ended before {sender(op)} started")
    return errors
