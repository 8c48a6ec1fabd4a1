"""The number formats in which a cluster's devices compute."""

from __future__ import annotations

from omegaconf import DictConfig


def computes(config: DictConfig, name: str) -> bool:
    """Whether the cluster's devices compute in a format ("bfloat16"), as far as their peaks are known."""
    peaks = config.cluster.peak_tflops
    return bool(peaks.get(name)) or not any(peaks.values())
