"""Training that diverges: the first loss or gradient that is not finite, where it is, and how large gradients were."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from harness.interfaces import Session, StepMetrics


class Diverged(RuntimeError):
    """The loss or a gradient is not finite."""


@dataclass(frozen=True)
class GradientNorm:
    """The norm of a parameter's gradient in a step, or of this rank's shard of it."""

    norm: float
    parameter: str
    step: int
    rank: int
    stage: int

    def __str__(self) -> str:
        return f"{self.norm:.3g} ({self.parameter}, rank {self.rank}, stage {self.stage})"


class DivergenceCheck:
    """Looks at the loss and the gradients after each step. Every rank has one; where they lie is in the message."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.largest: GradientNorm | None = None

    def after_step(self, step: int, metrics: StepMetrics) -> None:
        """Raises `Diverged`: in all ranks for a loss, which all of them have, in one rank for its own gradient.

        A step that the optimizer has skipped has gradients that are not finite, and does no harm.
        """
        before = self.largest
        norms = {} if metrics.skipped else self.session.gradient_norms()
        if not math.isfinite(metrics.loss):
            self._raise(f"the loss is {metrics.loss} at step {step}", before or self._largest(step, norms))
        bad = {name: norm for name, norm in norms.items() if not math.isfinite(norm)}
        if bad:
            found = self._largest(step, dict([next(iter(bad.items()))]))
            raise Diverged(_text(f"a gradient is not finite at step {step}: its norm is {found}", before))
        self.largest = self._largest(step, norms)

    def _largest(self, step: int, norms: dict[str, float]) -> GradientNorm | None:
        if not norms:
            return None
        name = max(norms, key=lambda name: (not math.isfinite(norms[name]), norms[name]))
        rank = dist.get_rank() if dist.is_initialized() else 0
        return GradientNorm(norms[name], name, step, rank, self.session.stage_of(name))

    def _raise(self, what: str, own: GradientNorm | None) -> None:
        """Collective: the largest of all ranks is reported."""
        found: list[Any] = [own]
        if dist.is_initialized():
            found = [None] * dist.get_world_size()
            dist.all_gather_object(found, own)
        finite = [one for one in found if one and math.isfinite(one.norm)]
        largest = max(finite or [one for one in found if one], key=lambda one: one.norm, default=None)
        raise Diverged(_text(what, largest))


def _text(what: str, largest: GradientNorm | None) -> str:
    norm = f"; the largest gradient norm of step {largest.step} is {largest}" if largest else ""
    return f"{what}, training diverged{norm} -> a smaller optimizer.lr"
