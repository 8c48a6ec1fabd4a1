"""Fit the numbers of a GPU's convolutions to the half of the cases that is not held back, as `analysis.gpu_cases.fit`.

V100   what matmuls and convolutions reach on tensor cores, and in float32 without them, and elementwise kernels
A100   what they reach in TF32, and elementwise kernels of images; in bfloat16 matmuls are fitted to GPTs
       (`analysis.gpu_cases.fit`), and to tensor cores a convolution is a matmul
P100   what matmuls and convolutions in float32, and elementwise kernels reach: two numbers on two cases

In float32 without tensor cores A100 takes what V100 reaches.
"""

from __future__ import annotations

from collections.abc import Sequence

from analysis.gpu_cases import image_cases, predict_images
from analysis.gpu_cases.fit import of_least_error

GPUS = {"V100": ("v100",), "A100": ("a100_40", "a100_80"), "P100": ("p100",)}
NUMBERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "V100": (
        ("matmul_efficiency", "convolution_efficiency"),
        ("float32_efficiency",),
        ("elementwise_efficiency",),
    ),
    "A100": (("tf32_efficiency",), ("image_efficiency",)),
    "P100": (("float32_efficiency",), ("elementwise_efficiency",)),
}
"""The numbers of each GPU that are fitted, each with the keys of the cluster that have it."""
START = 0.7
EVALUATIONS = 100


def fit(gpu: str) -> dict[str, float]:
    """Returns the keys of the cluster, by the least mean |log(predicted / measured)|."""
    found = [case for case in image_cases.load() if case.gpu in GPUS[gpu] and case.is_fitted]
    numbers = NUMBERS[gpu]

    def keys(shares: Sequence[float]) -> dict[str, float]:
        return {key: float(share) for names, share in zip(numbers, shares, strict=True) for key in names}

    return of_least_error(found, predict_images.step_s, keys, [START] * len(numbers), EVALUATIONS)
