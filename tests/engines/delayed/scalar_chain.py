"""Delayed training in plain numbers: a chain of factors, w[P-1] * ... * w[0] * x, the loss curvature / 2 * output^2.

Each stage is one factor, so its gradient can be written down: curvature * output * (output without the factor).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from harness.interfaces import Batch
from tests.engines.networks import Network

CURVATURE = 3.0


class Factor(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([value], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def network(factors: Sequence[float], fixed: int = 0) -> Network:
    """The last `fixed` factors are not trained."""

    def layers() -> list[nn.Module]:
        made = [Factor(value) for value in factors]
        for layer in made[len(made) - fixed :]:
            layer.requires_grad_(False)
        return [*made]

    return Network(
        "factors",
        layers,
        lambda n: torch.ones(n, 1, dtype=torch.float64),
        lambda n: torch.zeros(n, 1, dtype=torch.float64),
        lambda output, target: CURVATURE / 2 * ((output - target) ** 2).sum(),
    )


def batches(model: Network, steps: int) -> list[Batch]:
    """One sample each: x = 1."""
    return [model.sample(1) for _ in range(steps)]


def trained(factors: Sequence[float], updates: int, lr: float, momentum: float, versions: str) -> list[list[float]]:
    """The weights after each update of a pipeline that never drains; a micro-batch for each update."""
    count = len(factors)
    history, velocity = [list(factors)], [0.0] * count
    for n in range(updates):
        old = {"flush": [n] * count, "2bw": [max(n - 1, 0)] * count}.get(
            versions, [max(0, n - (count - 1 - j)) for j in range(count)]
        )
        forward = [history[version][j] for j, version in enumerate(old)]
        backward = history[n] if versions == "none" else forward
        arriving = [1.0]
        for factor in forward:
            arriving.append(arriving[-1] * factor)
        gradient, gradients = CURVATURE * arriving[-1], [0.0] * count
        for j in reversed(range(count)):
            gradients[j] = gradient * arriving[j]
            gradient *= backward[j]
        velocity = [momentum * v + g for v, g in zip(velocity, gradients, strict=True)]
        history.append([w - lr * v for w, v in zip(history[n], velocity, strict=True)])
    return history[1:]
