"""What a step computes in a second, of the model itself and of the hardware, and the tokens of a sample."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from harness.core.model_profile import ModelProfile
from harness.host import devices
from harness.planning.draft import Draft


def per_second(draft: Draft, step_s: float, count: int = 1) -> dict[str, Any]:
    """FLOP/s of the model itself, those of the hardware, which recomputation adds to, and their shares of all devices'
    peak.

    The peak of a CPU device is that of one thread, of which each device has `count`.
    """
    profile, copies = draft.profile, draft.plan.mesh.data * draft.plan.mesh.tensor
    last = len(profile.layers) - 1
    flops = profile.sum("flops", 0, last) + profile.sum("backward_flops", 0, last)
    model = flops * draft.plan.micro_batches * copies
    peak = draft.cluster.device.peak_flops.get(profile.autocast or profile.dtype, 0.0) * count * draft.devices
    found: dict[str, Any] = {}
    for name, work in (("", model), ("hardware_", model + _recomputed_flops(draft) * copies)):
        speed = work / step_s if step_s else 0.0
        found[f"{name or 'model_'}flops_per_s"] = speed or None
        found[f"{name}percent_of_peak"] = 100 * speed / peak if peak and speed else None
    return found


def simulated(config: DictConfig, draft: Draft, step_s: float) -> dict[str, Any]:
    """Samples and tokens of a simulated step in a second, tokens of each device at work, and `per_second`.

    Tokens are None where samples are no tokens."""
    samples_per_s = draft.samples / step_s if step_s else None
    tokens_per_s = tokens(draft.profile, samples_per_s)
    return {
        "throughput": samples_per_s,
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_device": tokens_per_s / draft.devices if tokens_per_s else None,
        **per_second(draft, step_s, threads(config) if draft.cluster.cores else 1),
    }


def _recomputed_flops(draft: Draft) -> float:
    """FLOPs that one replica's shard recomputes: layers inside their backward passes, and whole stages."""
    profile, stages = draft.profile, draft.plan.stages
    each = [profile.sum("flops", stage.first, stage.last) for stage in stages]
    whole = sum(each[op.stage] for queue in draft.schedule.queues for op in queue.ops if op.kind == "R")
    return whole + draft.plan.micro_batches * profile.sum("recomputed_flops", 0, len(profile.layers) - 1)


def threads(config: DictConfig) -> int:
    """Intra-op threads of each CPU device: 1, unless the engine has a key for it (0 is one for each core)."""
    count: int = config.engine.get("threads", 1) or devices.cores()
    return count


def tokens(profile: ModelProfile, samples: float | None) -> float | None:
    """The tokens of so many samples: what the first embedding of the model looks up; None without one."""
    rows = (one.rows_per_sample for layer in profile.layers for one in layer.products if one.kind == "embedding")
    return samples * each if samples and (each := next(rows, None)) else None
