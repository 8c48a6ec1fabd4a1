"""The keys of `model=mlp`."""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.core.problem import Problem

TASK = "classification"
"""The task that the model is trained for."""


@dataclass
class Config:
    """Dense layers without bias, a ReLU between any two: the network of AutoDDL's search (figure 8)."""

    name: str = "mlp"
    """The network: models/mlp."""
    widths: list[int] = field(default_factory=lambda: [64, 128, 128, 10])
    """Input size, sizes of the hidden layers, number of classes."""


def check(config: Config) -> list[Problem]:
    """Numbers that no model can have."""
    widths = config.widths
    if len(widths) < 2:
        message = f"has {len(widths)}, needs at least 2: the numbers of a sample and the classes"
    elif min(widths) < 1:
        message = f"holds {min(widths)}, each must be at least 1"
    elif widths[-1] < 2:
        message = f"ends with {widths[-1]} classes, must be at least 2"
    else:
        return []
    return [Problem("model.widths", list(widths), message, ({"model.widths": [64, 128, 128, 10]},))]
