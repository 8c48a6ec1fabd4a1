"""The model's own synthetic sample, resident in memory: every step trains on the same batch, as in the papers."""

from __future__ import annotations

from dataclasses import dataclass

from harness.interfaces import Batch, Model


@dataclass
class Config:
    """Synthetic data has no keys of its own; `seed` draws another batch."""

    name: str = "synthetic"
    """The data set: models/data/synthetic.py."""


def build(config: Config, model: Model, seed: int) -> Synthetic:
    """Synthetic data for any task."""
    return Synthetic(model, seed)


class Synthetic:
    """Implements `harness.interfaces.Data` with one batch for each batch size, drawn when it is first asked for."""

    def __init__(self, model: Model, seed: int) -> None:
        self._model = model
        self._seed = seed
        self._resident: dict[int, Batch] = {}

    def batch(self, step: int, size: int) -> Batch:
        """Return the same `size` samples for every `step`, on the CPU, without changing torch's random generator."""
        if size not in self._resident:
            self._resident[size] = self._draw(size)
        return self._resident[size]

    def _draw(self, size: int) -> Batch:
        import torch

        generator = torch.default_generator
        before = generator.get_state()
        generator.manual_seed(self._seed)
        try:
            with torch.device("cpu"):
                return self._model.sample(size)
        finally:
            generator.set_state(before)
