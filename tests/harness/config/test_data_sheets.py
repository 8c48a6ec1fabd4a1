from __future__ import annotations

import pytest

from harness.config import data_sheets


@pytest.mark.parametrize(
    ("gpu", "numbers", "tflops"),
    [
        ("NVIDIA H200", "bfloat16", 989),
        ("NVIDIA H200", "float64", None),
        ("NVIDIA H100 80GB HBM3", "tf32", 494),
        ("NVIDIA A100-SXM4-40GB", "float32", 19.5),
        ("NVIDIA A100-SXM4-80GB", "float16", 312),
        ("Tesla V100-SXM2-16GB", "float16", 125),
        ("Tesla V100-SXM2-16GB", "bfloat16", None),
        ("Tesla P100-PCIE-16GB", "float32", 9.3),
        ("Tesla P40", "float32", 11.76),
        ("NVIDIA H200 NVL", "bfloat16", None),
        ("NVIDIA H100 PCIe", "bfloat16", None),
        ("GPU", "float32", None),
    ],
)
def test_peaks(gpu: str, numbers: str, tflops: float | None) -> None:
    assert data_sheets.peak_flops(gpu, numbers) == (None if tflops is None else pytest.approx(1e12 * tflops))


def test_each_gpu_has_a_cluster() -> None:
    assert all((data_sheets.FILES / f"{cluster}.yaml").is_file() for cluster in data_sheets.CLUSTERS.values())
