"""torch's optimizers on slices of flat buffers: element by element they do what `harness.runtime.training_state`
makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from harness.interfaces import OptimizerSpec

EPS = 1e-8
PIECE = 2**18
"""Elements that a CPU updates at once: they stay in its caches from one operation to the next (four times as fast)."""


@dataclass(frozen=True)
class Run:
    """The elements `start` .. `stop` - 1, which have all been updated `done` times."""

    start: int
    stop: int
    done: int

    def within(self, start: int, stop: int) -> Run | None:
        """Return the part of this run between `start` and `stop`; None if there is none."""
        first, last = max(self.start, start), min(self.stop, stop)
        return Run(first, last, self.done) if first < last else None


class Optimizer:
    """`rows` name what it keeps of each element, as torch's state does; `counts`: its state has a "step", too."""

    def __init__(self, spec: OptimizerSpec) -> None:
        self.spec = spec
        self.counts = spec.name != "sgd"
        self.rows = ("exp_avg", "exp_avg_sq") if self.counts else ("momentum_buffer",) if spec.momentum else ()

    def step(self, weights: Tensor, gradients: Tensor, rows: Sequence[Tensor], runs: Sequence[Run], start: int) -> None:
        """Update slices that begin at element `start` of the whole, where `runs` say; all others stay as they are."""
        piece = PIECE if weights.device.type == "cpu" else len(weights)
        for run in runs:
            own = run.within(start, start + len(weights))
            for first in range(own.start, own.stop, piece) if own else ():
                part = slice(first - start, min(first + piece, run.stop) - start)
                self._step(weights[part], gradients[part], [row[part] for row in rows], run.done)

    def _step(self, weights: Tensor, gradients: Tensor, rows: list[Tensor], done: int) -> None:
        spec = self.spec
        if not self.counts:
            momenta: list[Tensor | None] = [*rows] or [None]
            sgd(
                [weights],
                [gradients],
                momenta,
                foreach=False,
                fused=spec.fused,
                weight_decay=spec.weight_decay,
                momentum=spec.momentum,
                lr=spec.lr,
                dampening=0.0,
                nesterov=spec.nesterov,
                maximize=False,
            )
            return
        first, second = rows
        steps = torch.tensor(float(done), device=weights.device if spec.fused else None)
        adam(
            [weights],
            [gradients],
            [first],
            [second],
            [],
            [steps],
            foreach=False,
            fused=spec.fused,
            decoupled_weight_decay=spec.name == "adamw",
            amsgrad=False,
            beta1=spec.betas[0],
            beta2=spec.betas[1],
            lr=spec.lr,
            weight_decay=spec.weight_decay,
            eps=EPS,
            maximize=False,
        )
