"""The metrics of a record: what a rank measured, or what the simulator found, under the same names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from harness import costs, devices
from harness.period import period_s
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
    """FLOP/s of the model itself (recomputation is no work of its own), and its share of all devices' peak.

    The peak of a CPU device is that of one thread, of which each device has `count`.
    """
    profile, plan = draft.profile, draft.plan
    alike = plan.mesh.data * plan.mesh.tensor
    forward = profile.sum("flops", 0, len(profile.layers) - 1) * plan.micro_batches * alike
    speed = 3 * forward / step_s if step_s else 0.0
    peak = draft.cluster.device.peak_flops.get(profile.autocast or profile.dtype, 0.0)
    reached = 100 * speed / (peak * count * draft.devices) if peak else None
    return {"model_flops_per_s": speed or None, "percent_of_peak": reached if speed else None}
