"""The keys of `model=mlp`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.mlp.mlp import MLP

TASK = "classification"
"""What it is trained for."""


@dataclass
class Config:
    """Dense layers without bias, a ReLU between any two: the network of AutoDDL's search (figure 8)."""

    name: str = "mlp"
    """The network: models/mlp."""
    widths: list[int] = field(default_factory=lambda: [64, 128, 128, 10])
    """Numbers of a sample, widths of the layers within, classes."""


def build(config: Config) -> MLP:
    """The model; raises ValueError that names each key whose number is impossible."""
    from models.mlp.mlp import MLP

    return MLP(config)


def check(config: Config) -> None:
    """Raise ValueError with a line, `key   what   -> mend`, for each impossible number."""
    widths = config.widths
    if len(widths) < 2:
        what = f"has {len(widths)}, needs at least 2: the numbers of a sample and the classes"
    elif min(widths) < 1:
        what = f"holds {min(widths)}, each must be at least 1"
    elif widths[-1] < 2:
        what = f"ends with {widths[-1]} classes, must be at least 2"
    else:
        return
    raise ValueError(f"model.widths {widths}   {what}   -> model.widths=[64,128,128,10]")
