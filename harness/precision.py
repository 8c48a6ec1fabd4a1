"""The number formats of a run."""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = ("float32", "float64", "bfloat16", "float16")
AUTOCAST = ("bfloat16", "float16")


@dataclass
class PrecisionConfig:
    """`precision=fp32`, with the keys of every precision."""

    name: str = "fp32"
    """What the record calls it."""
    dtype: str = "float32"
    """Format of weights, gradients, optimizer state and activations: float32, float64, bfloat16 or float16."""
    autocast: str | None = None
    """Format that torch.autocast computes the forward pass in: bfloat16, float16 or null for none."""
