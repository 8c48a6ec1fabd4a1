"""The peaks of GPUs of this machine by NVIDIA's data sheets, which the clusters of conf/cluster hold."""

from __future__ import annotations

import re

import yaml

from harness.config import registry

CLUSTERS = {
    r"NVIDIA A100-SXM4-[48]0GB": "dgx_a100_80",
    r"NVIDIA H100 80GB HBM3": "dgx_h100",
    r"NVIDIA H200": "h200",
    r"Tesla P40": "p40x8",
    r"Tesla P100-PCIE-1[26]GB": "piz_daint",
    r"Tesla V100-SXM2-(16|32)GB": "summit",
}
"""What NVML calls a GPU, and a cluster of such GPUs."""
FILES = registry.ROOT / "conf" / "cluster"


def peak_flops(gpu: str, numbers: str) -> float | None:
    """Returns FLOP/s in a format ("bfloat16", "tf32"), without sparsity; None for a GPU or format that no file has, and
    for float64, which has two: libraries may use tensor cores or not."""
    named = [cluster for pattern, cluster in CLUSTERS.items() if re.fullmatch(pattern, gpu)]
    if not named:
        return None
    peaks = yaml.safe_load((FILES / f"{named[0]}.yaml").read_text())["peak_tflops"]
    return 1e12 * peaks[numbers] if numbers in peaks and numbers != "float64" else None
