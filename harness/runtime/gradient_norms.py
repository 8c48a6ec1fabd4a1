"""The norms of gradients: of those that a step leaves, or, where it uses them up, as its optimizer saw them."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

PART = "a part of the weights"
"""The name of a vector with many parameters, or shards of them."""


def norms_of(gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the norm of each gradient, with one wait for each device, not for each tensor."""
    return dict(zip(gradients, _values(_norms(list(gradients.values()))), strict=True))


def _norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The norms, also where the sum of squares is too large for the gradient's own format. Nothing waits for a GPU.

    float64 costs a GPU nothing, and a CPU much: there it is used only where it must be.
    """
    tensors = [one.coalesce().values() if one.is_sparse else one for one in gradients]
    if not tensors:
        return []
    if any(one.device.type != "cpu" for one in tensors):
        return list(torch._foreach_norm(tensors, 2, torch.float64))
    norms = zip(tensors, torch._foreach_norm(tensors), strict=True)
    return [norm if math.isfinite(norm) else torch.linalg.vector_norm(one, dtype=torch.float64) for one, norm in norms]


def _values(norms: Sequence[Tensor]) -> list[float]:
    found = [0.0] * len(norms)
    for device in {norm.device for norm in norms}:
        indices = [i for i, norm in enumerate(norms) if norm.device == device]
        for i, value in zip(indices, torch.stack([norms[i].double() for i in indices]).tolist(), strict=True):
            found[i] = value
    return found


class UpdateNorms:
    """Notes the norms of the gradients with which optimizers update, since they do not stay.

    `names` are those of the parameters. An optimizer may have others, flat vectors of many of them: `PART`. Optimizers
    may update in several threads, and several times in a step: then the largest norm counts.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], names: Mapping[nn.Parameter, str]) -> None:
        self.names = names
        self.lock = threading.Lock()
        self.found: dict[str, list[Tensor]] = defaultdict(list)
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._note)

    def begin(self) -> None:
        """A step begins: those of the one before are forgotten."""
        self.found.clear()

    def norms(self) -> dict[str, float]:
        """Return the norms of the last step; one that is no number is larger than all others."""
        names = [name for name, norms in self.found.items() for _ in norms]
        values = _values([norm for norms in self.found.values() for norm in norms])
        largest: dict[str, float] = {}
        for name, value in zip(names, values, strict=True):
            largest[name] = max(largest.get(name, 0.0), value, key=lambda one: (math.isnan(one), one))
        return largest

    def _note(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        norms = _norms([one.grad for one in parameters])
        with self.lock:
            for parameter, norm in zip(parameters, norms, strict=True):
                self.found[self.names.get(parameter, PART)].append(norm)
