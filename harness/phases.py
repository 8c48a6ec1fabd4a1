"""The phases of a training step (Myelin, section V-B), from what was done in it."""

from __future__ import annotations

import statistics
from collections import defaultdict

from harness.op import Op
from harness.schedule.chunks import OUT, way
from harness.schedule.graph import DATA, split_part
from harness.trace import Trace

PASSES = ("F", "B", "W", "R")
PHASES = ("pipelining", "data_parallel", "optimizer")


def phases_s(trace: Trace) -> dict[str, float] | None:
    """Seconds of each phase, the median over the steps; None where no trace was left.

    pipelining     from the begin of the step to the end of the last forward or backward task
    data_parallel  of the device where that is longest, from the first sum over replicas to the last one's end
    optimizer      likewise from the first update on, with what goes back to the host; what comes from there may come
                   while sums still run

    Where sums and updates overlap, so do these two. Sums of tied parameters are in none.
    """
    if not trace.spans or not trace.steps:
        return None
    ends: dict[tuple[str, int, int], list[tuple[float, float]]] = defaultdict(list)
    for span in trace.spans:
        phase = _phase(span.parsed)
        if phase:
            ends[phase, span.step, span.device].append((span.start_s, span.end_s))
    found = {phase: [0.0] * len(trace.steps) for phase in PHASES}
    for (phase, step, _), spans in ends.items():
        begun = trace.steps[step][0] if phase == "pipelining" else min(start for start, _ in spans)
        found[phase][step] = max(found[phase][step], max(end for _, end in spans) - begun)
    return {phase: statistics.median(times) for phase, times in found.items()}


def _phase(op: Op) -> str:
    if op.kind in PASSES:
        return "pipelining"
    if op.kind == "collective" and split_part(op.part)[1] == DATA:
        return "data_parallel"
    return "optimizer" if op.kind == "step" or way(op)[1] == OUT else ""
