"""Parts of the group `cluster`: peaks of a device, and the values that published timings imply."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass

from omegaconf import DictConfig


@dataclass
class PeakConfig:
    """FLOP/s of a device, multiplications and additions both counted; null: not known, or as measured here."""

    float32: float | None = None
    """Peak TFLOP/s in float32; with precision.tf32=true that of tf32, if it is given."""
    tf32: float | None = None
    """Peak TFLOP/s in float32 with precision.tf32=true, dense."""
    float64: float | None = None
    """Peak TFLOP/s in float64."""
    bfloat16: float | None = None
    """Peak TFLOP/s in bfloat16, dense."""
    float16: float | None = None
    """Peak TFLOP/s in float16, dense."""


@dataclass
class EffectiveConfig:
    """Values that published timings imply, next to the nominal ones; null: the nominal value."""

    efficiency: float | None = None
    """Effective value of cluster.efficiency."""
    matmul_efficiency: float | None = None
    """Effective value of cluster.matmul_efficiency."""
    convolution_efficiency: float | None = None
    """Effective value of cluster.convolution_efficiency."""
    attention_efficiency: float | None = None
    """Effective value of cluster.attention_efficiency."""
    elementwise_efficiency: float | None = None
    """Effective value of cluster.elementwise_efficiency."""
    image_efficiency: float | None = None
    """Effective value of cluster.image_efficiency."""
    float32_efficiency: float | None = None
    """Effective value of cluster.float32_efficiency."""
    tf32_efficiency: float | None = None
    """Effective value of cluster.tf32_efficiency."""
    overlap: float | None = None
    """Effective value of cluster.overlap."""
    bandwidth_gb_s: float | None = None
    """Effective value of cluster.bandwidth_gb_s."""
    alpha_s: float | None = None
    """Effective value of cluster.alpha_s."""
    node_bandwidth_gb_s: float | None = None
    """Effective value of cluster.node_bandwidth_gb_s."""
    node_alpha_s: float | None = None
    """Effective value of cluster.node_alpha_s."""
    node_alone_gb_s: float | None = None
    """Effective value of cluster.node_alone_gb_s."""
    task_s: float | None = None
    """Effective value of cluster.task_s."""
    host_bandwidth_gb_s: float | None = None
    """Effective value of cluster.host_bandwidth_gb_s."""
    host_alpha_s: float | None = None
    """Effective value of cluster.host_alpha_s."""


EFFECTIVE_KEYS = tuple(key.name for key in dataclasses.fields(EffectiveConfig))


def follow_keys(config: DictConfig, tf32: bool, typed: Collection[str]) -> None:
    """Let a key that the user typed replace the effective value, too, and with `tf32` its peak, the share of it that is
    reached, and the waves of tensor cores, be those of float32.

    `config` is the composed group `cluster`, `typed` the full names of the keys that were typed.
    """
    if tf32 and config.peak_tflops.tf32 is not None and "cluster.peak_tflops.float32" not in typed:
        config.peak_tflops.float32 = "${cluster.peak_tflops.tf32}"
        for part, prefix in ((config, "cluster."), (config.effective, "cluster.effective.")):
            if f"{prefix}float32_efficiency" not in typed and "cluster.float32_efficiency" not in typed:
                part.float32_efficiency = f"${{{prefix}tf32_efficiency}}"
        if "cluster.float32_wave_elements" not in typed:
            config.float32_wave_elements = None
    for key in EFFECTIVE_KEYS:
        given = f"cluster.{key}" in typed and f"cluster.effective.{key}" not in typed
        if given and config.effective[key] is not None:
            config.effective[key] = f"${{cluster.{key}}}"
