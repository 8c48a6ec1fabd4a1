"""The number formats in which a cluster's devices compute, and which one to take in the place of another.

precision=mixed cluster=summit     a V100 has no bfloat16     -> float16 with scaled losses, or float32
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from omegaconf import DictConfig

from harness.core.cluster import Cluster
from harness.core.problem import Fix, Problem
from harness.interfaces import Capabilities
from harness.simulator import layer_times

PEAK = "cluster.peak_tflops."
"""The keys of the devices' peaks: this and a format."""
BANDWIDTH = "cluster.memory_bandwidth_gb_s"
SCALED: Fix = {"precision.autocast": "float16", "precision.grad_scaler": True}
MIXED: Fix = {"precision": "mixed"} | SCALED
"""Weights in float32, matmuls in float16, and losses that are scaled."""


def computes(config: DictConfig, name: str) -> bool:
    """Whether the cluster's devices compute in a format ("bfloat16"), as far as their peaks are known."""
    peaks = config.cluster.peak_tflops
    return bool(peaks.get(name)) or not any(peaks.values())


def with_instead(problems: Sequence[Problem], config: DictConfig, can: Capabilities) -> list[Problem]:
    """The problems, those that a peak or a bandwidth is missing with what to take instead: another format, or, where
    the devices may have this one, the layer times of this machine."""
    key = f"{PEAK}{config.precision.autocast or config.precision.dtype}"
    others = instead(config, can)
    measured: list[Fix] = [] if config.profile else [{"costs": "measured"}]
    found = []
    for one in problems:
        if one.key == key and others:
            found.append(replace(one, fixes=tuple(others), hint=""))
        else:
            found.append(replace(one, fixes=tuple(measured)) if one.key in (key, BANDWIDTH) else one)
    return found


def lacking(config: DictConfig, can: Capabilities, cluster: Cluster) -> list[Problem]:
    """The format of a run whose layer times follow from the peaks of a described cluster, if that has none in it."""
    priced = config.costs == "analytic" or (config.costs == "auto" and any(cluster.device.peak_flops.values()))
    if config.cluster.name == "local" or config.profile or not priced:
        return []  # a stored profile may have times of its own
    found = layer_times.without_peak(config.precision.autocast or config.precision.dtype, cluster.device)
    return with_instead(found, config, can)


def instead(config: DictConfig, can: Capabilities) -> list[Fix]:
    """Formats that devices and engine have, in the place of one that the devices lack: float32, and in the place of
    bfloat16 float16 with scaled losses, first where the devices are faster in it."""
    precision, fixes = config.precision, list[Fix]()
    lacks = precision.autocast or precision.dtype
    if computes(config, lacks):
        return []  # no peak is known
    if computes(config, "float32"):
        fixes.append(float32(config))
    if lacks == "bfloat16" and computes(config, "float16"):
        half = [SCALED if precision.autocast else MIXED] if scales(config, can) else []
        if not can.grad_scaler and "float16" in can.dtypes and config.mode != "tune":
            half = [{"precision": "fp16"}]
        fixes = half + fixes if is_faster(config) else fixes + half
    return fixes


def scales(config: DictConfig, can: Capabilities) -> bool:
    """Whether it can be advised to scale losses: in mode=tune several engines may be asked, not all of which do."""
    return can.grad_scaler and config.mode != "tune"


def is_faster(config: DictConfig) -> bool:
    """Whether devices are known to be faster in float16 than in float32."""
    peaks = config.cluster.peak_tflops
    return (peaks.get("float16") or 0.0) > (peaks.get("float32") or 0.0)


def mixed(config: DictConfig, can: Capabilities) -> list[Fix]:
    """In the place of weights in float16: float16 under autocast with scaled losses, or bfloat16 there with an engine
    that scales none."""
    if scales(config, can) and computes(config, "float16"):
        return [MIXED]
    return [{"precision": "mixed"}] if computes(config, "bfloat16") else []


def without_float16(config: DictConfig, can: Capabilities, peaks: Mapping[str, float]) -> tuple[Fix, ...]:
    """Settings for a run in float16 that overflows, the fastest first by the FLOP/s of the devices; () for others.

    Of devices without a peak it is not known what they have.
    """
    precision, known = config.precision, any(peaks.values())
    names = [name for name in ("bfloat16", "float32") if peaks.get(name) or not known]
    names.sort(key=lambda name: -peaks.get(name, 0.0))
    if precision.dtype == "float16":
        return tuple({"precision.dtype": name} for name in names if name in can.dtypes)
    if precision.autocast != "float16":
        return ()
    scaled: Fix = {"precision.grad_scaler": False} if precision.grad_scaler else {}
    return tuple({"precision.autocast": None if name == "float32" else name} | scaled for name in names)


def float32(config: DictConfig) -> Fix:
    """All in float32, without what has an effect on mixed precision alone."""
    mixing: Fix = {"engine.mixed_precision": "autocast"} if config.engine.get("mixed_precision") == "policy" else {}
    return {"precision": "fp32"} | mixing
