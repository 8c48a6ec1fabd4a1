"""The metrics of a record: what a rank measured, or what the simulator found, under the same names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from harness import costs, devices
from harness.period import period_s
from harness.phases import phases_s
from harness.planning import Draft
from harness.serial import encode
from harness.simulate import Simulation

COSTS = ("measured", "scaled", "analytic", "none")
"""The first word of a profile's source."""


def measured(result: dict[str, Any], draft: Draft, config: DictConfig, kind: devices.Kind) -> dict[str, Any]:
    """What the rank measured, and what follows from it: work per second, and predicted / measured."""
    expected, peaks = draft.plan.predicted, result["peak_memory_bytes"]
    ratios = {
        "step_time_s": expected["step_time_s"] / result["step_time_s"],
        "peak_memory_bytes": [p / m for p, m in zip(expected["peak_memory_bytes"], peaks, strict=True)]
        if peaks
        else None,
    }
    count = threads(config)
    work = _work(draft, result["step_time_s"], count if kind == "cpu" else 1)
    return {**result, **work, "threads": count, "predicted_over_measured": ratios}


def simulated(simulation: Simulation, draft: Draft) -> dict[str, Any]:
    """What a real run would measure, as the simulator finds it; beside that each device's fullest moment."""
    step_s = simulation.figures["step_time_s"]
    return {
        **simulation.figures,
        "throughput": draft.samples / step_s if step_s else None,
        **_work(draft, step_s),
        "period_s": period_s(simulation.trace),
        "phases_s": phases_s(simulation.trace),
        "loss": None,
        "peaks": encode(simulation.peaks),
    }


def basis(draft: Draft, config: DictConfig, values: str) -> dict[str, Any]:
    """What a simulated or predicted number rests on; `values` says where the cluster's numbers are from.

    `note` is empty, or warns of layer times that are not those of the described cluster.
    """
    profile, device = draft.profile, draft.cluster.device
    described = config.cluster.name != "local"
    kind = profile.source.partition(" ")[0].rstrip(",")
    return {
        "costs": kind if kind in COSTS else "as given",
        "layer_times": profile.source,
        "note": costs.borrowed(profile, device, given=bool(config.profile)) if described else "",
        "model": profile.model or (Path(config.profile).stem if config.profile else config.model.name),
        "cluster": draft.cluster.to_json(),
        "values": values,
        "jitter": config.jitter if config.mode == "simulate" else 0.0,
        "seed": config.seed,
    }


def threads(config: DictConfig) -> int:
    """Intra-op threads of each CPU device: 1, unless the engine has a key for it (0 is one for each core)."""
    count: int = config.engine.get("threads", 1) or devices.cores()
    return count


def _work(draft: Draft, step_s: float, count: int = 1) -> dict[str, Any]:
    """FLOP/s of the model itself, those of the hardware, which recomputation adds to, and their shares of all devices'
    peak.

    The peak of a CPU device is that of one thread, of which each device has `count`.
    """
    profile, alike = draft.profile, draft.plan.mesh.data * draft.plan.mesh.tensor
    model = 3 * profile.sum("flops", 0, len(profile.layers) - 1) * draft.plan.micro_batches * alike
    peak = draft.cluster.device.peak_flops.get(profile.autocast or profile.dtype, 0.0) * count * draft.devices
    found: dict[str, Any] = {}
    for name, work in (("", model), ("hardware_", model + _recomputed_flops(draft) * alike)):
        speed = work / step_s if step_s else 0.0
        found[f"{name or 'model_'}flops_per_s"] = speed or None
        found[f"{name}percent_of_peak"] = 100 * speed / peak if peak and speed else None
    return found


def _recomputed_flops(draft: Draft) -> float:
    """Of one replica and shard: of layers inside their backward passes, and of whole stages."""
    profile, stages = draft.profile, draft.plan.stages
    each = [profile.sum("flops", stage.first, stage.last) for stage in stages]
    whole = sum(each[op.stage] for lane in draft.schedule.lanes for op in lane.ops if op.kind == "R")
    return whole + draft.plan.micro_batches * profile.sum("recomputed_flops", 0, len(profile.layers) - 1)
