"""The model's own synthetic sample, resident in memory: every step trains on the same batch, as in the papers.

A model that works in place on its inputs would change it for the next step: then each step gets a copy.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.interfaces import Batch, Model

AHEAD = 2
"""Batches that are asked for before the first step has ended: the next one is made while a step runs."""


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
        self._copies: dict[int, list[Batch]] = {}
        self._changes: dict[int, bool] = {}

    def batch(self, step: int, size: int) -> Batch:
        """Return the same `size` samples for every `step`, on the CPU, without changing torch's random generator.

        The first ones are copies; whether the first step has changed its own says what all others are.
        """
        if size not in self._resident:
            self._resident[size], self._copies[size] = self._draw(size), []
        resident, copies = self._resident[size], self._copies[size]
        if size not in self._changes and len(copies) == AHEAD:
            self._changes[size] = not _same(copies[0], resident)
            copies.clear()
        if not self._changes.get(size, True):
            return resident
        copy = _copied(resident)
        if size not in self._changes:
            copies.append(copy)
        return copy

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


def _copied(batch: Batch) -> Batch:
    import torch

    from harness.runtime.values import mapped

    return Batch(mapped(torch.clone, batch.inputs), mapped(torch.clone, batch.targets))


def _same(one: Batch, other: Batch) -> bool:
    """Whether both have the same numbers; what is none counts as the same."""
    from harness.runtime.values import tensors_of

    mine, others = ((*tensors_of(batch.inputs), *tensors_of(batch.targets)) for batch in (one, other))
    return all(bool(((a == b) | ((a != a) & (b != b))).all()) for a, b in zip(mine, others, strict=True))
