"""The metrics of a record: what a rank measured, or what the simulator found, under the same names.

The period in which an engine repeats a pattern, from what it did.

The phases of a training step (Myelin, section V-B), from what was done in it.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from harness.config import data_sheets
from harness.core.op import Op
from harness.core.problem import line
from harness.core.serialization import encode
from harness.core.trace import Trace
from harness.host import devices
from harness.planning import work
from harness.planning.draft import Draft, Layout
from harness.schedule.dependency_graph import DATA, split_part
from harness.schedule.optimizer_chunks import OUT, copy_direction
from harness.schedule.step_parts import parts_s, quickest_computing_s
from harness.simulator import Simulation, layer_times


def measured(result: dict[str, Any], draft: Draft, config: DictConfig, kind: devices.Kind) -> dict[str, Any]:
    """Return the measured metrics of a run, work per second, and predicted / measured."""
    expected, peaks = draft.plan.predicted, result["peak_memory_bytes"]
    ratios = {
        "step_time_s": expected["step_time_s"] / result["step_time_s"],
        "peak_memory_bytes": [p / m for p, m in zip(expected["peak_memory_bytes"], peaks, strict=True)]
        if peaks
        else None,
    }
    count = work.threads(config)
    done = work.per_second(draft, result["step_time_s"], count if kind == "cpu" else 1)
    if tokens := result.get("tokens_per_s"):
        done["tokens_per_s_per_device"] = tokens / draft.devices
    if kind == "cuda":
        done["data_sheet_percent_of_peak"] = _of_data_sheet(draft, config, done["model_flops_per_s"])
    own = kind == "cpu" and draft.devices * count > devices.cores()  # its devices wait for one another
    slowed = None if own else result.get("slowed")
    return {**result, **done, "slowed": slowed, "threads": count, "predicted_over_measured": ratios}


def _of_data_sheet(draft: Draft, config: DictConfig, flops_per_s: float | None) -> float | None:
    """Return the share of the peak that NVIDIA names for these GPUs, in percent; None where that is not known."""
    numbers = draft.profile.autocast or draft.profile.dtype
    numbers = "tf32" if numbers == "float32" and config.precision.tf32 else numbers
    peak = data_sheets.peak_flops(draft.cluster.device.name, numbers)
    return 100 * flops_per_s / (peak * draft.devices) if flops_per_s and peak else None


def simulated(simulation: Simulation, draft: Draft, config: DictConfig) -> dict[str, Any]:
    """Return the metrics of a simulated run, which a real one would measure, and each device's peak memory."""
    return {
        **simulation.figures,
        **work.simulated(config, draft, simulation.figures["step_time_s"]),
        "period_s": period_s(simulation.trace),
        "phases_s": phases_s(simulation.trace),
        "parts_s": parts_s(simulation.trace, simulation.schedule),
        "loss": None,
        "peaks": encode(simulation.peaks),
    }


def traced(trace: Trace, draft: Draft) -> dict[str, Any]:
    """Return what a measured trace says about the parts of a step."""
    return {"parts_s": parts_s(trace, draft.schedule), "quickest_computing_s": quickest_computing_s(trace)}


def basis(made: Draft | Layout, config: DictConfig, values: str) -> dict[str, Any]:
    """Return the basis of a simulated or predicted number; `values` is the source of the cluster's numbers.

    `note` is empty, or warns of layer times that are not those of the described cluster; `slowed` is by how much a busy
    machine slowed down what was measured; `upper_bound` says whether speeds are: the device is not calibrated.
    """
    profile, device = made.profile, made.cluster.device
    described = config.cluster.name != "local"
    warning = layer_times.times_warning(profile, device, user_profile=bool(config.profile)) if described else None
    return {
        "costs": profile.times,
        "layer_times": profile.source,
        "slowed": profile.slowed,
        "lock_share": profile.lock_share,
        "note": line(warning) if warning else "",
        "upper_bound": layer_times.are_bounds(profile, made.cluster),
        "model": profile.model or (Path(config.profile).stem if config.profile else config.model.name),
        "cluster": made.cluster.to_json(),
        "values": values,
        "jitter": config.jitter if config.mode == "simulate" else 0.0,
        "seed": config.seed,
    }


def period_s(trace: Trace) -> float | None:
    """Median time between the starts of the last stage's backward tasks, in the middle half of each step: without the
    filling and draining of a step.

    None where no pattern is repeated: there weights are updated at the end of a step, and not after some micro-batch.
    """
    ops = [span.parsed for span in trace.spans]
    if not any(op.kind == "step" and op.micro_batch is not None for op in ops):
        return None
    last = max(op.stage for op in ops)
    begun: dict[int, list[float]] = {}
    for span, op in zip(trace.spans, ops, strict=True):
        if (op.stage, op.kind) == (last, "B"):
            begun.setdefault(span.step, []).append(span.start_s)
    between = [later - earlier for starts in begun.values() for earlier, later in pairwise(_middle(sorted(starts)))]
    return statistics.median(between) if between else None


def _middle(starts: list[float]) -> list[float]:
    quarter = len(starts) // 4
    return starts[quarter : len(starts) - quarter]


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
    return "optimizer" if op.kind == "step" or copy_direction(op)[1] == OUT else ""
