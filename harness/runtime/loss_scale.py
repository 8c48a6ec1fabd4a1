"""The loss scale of float16: gradients are multiplied by it, so that small ones do not vanish."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.core.problem import Fix, typed

START, LEAST = 2.0**16, 1.0
PATIENCE = 2000
"""Steps without an overflow after which the scale doubles."""


class LossScale:
    """Halved at an overflow, doubled after `PATIENCE` steps without one; or `fixed`.

    `overflow` says at what scale the last step overflowed; "" if it did not. Each of `instead` makes a run without
    float16.
    """

    def __init__(self, fixed: float | None = None, instead: Sequence[Fix] = ()) -> None:
        self.fixed, self.instead = fixed, instead
        self.value = START if fixed is None else fixed
        self.good = self.skipped = 0
        self.overflow = ""

    def state(self) -> dict[str, float]:
        """Return the loss scaler's part of a state dict."""
        return {"value": self.value, "good": self.good}

    def load(self, state: dict[str, float] | None) -> None:
        """The inverse of `state`. Without one it starts from scratch; one that is `fixed` stays."""
        self.good = int(state["good"]) if state else 0
        if self.fixed is None:
            self.value = float(state["value"]) if state else START

    def judge(self, overflow: bool) -> None:
        """A step has ended. Raises FloatingPointError where the scale cannot fall any further."""
        self.overflow = ""
        if not overflow:
            self.good += 1
            if self.good % PATIENCE == 0 and self.fixed is None:
                self.value *= 2
            return
        self.good = 0
        self.skipped += 1
        self.overflow = f"gradients overflow float16 at a loss scale of {self.value:g}"
        if self.fixed is None:
            if self.value / 2 < LEAST:
                fixes = ", or ".join([*map(typed, self.instead), "a smaller optimizer.lr"])
                raise FloatingPointError(f"{self.overflow}, which falls to {LEAST:g} at most -> {fixes}")
            self.value /= 2


def overflows(gradients: Tensor, ranks: int) -> bool:
    """Whether they are not finite, or the sum over so many `ranks` need not be.

    No sum of numbers up to x, each addition rounded, is larger than ranks x (1 + eps / 2)^(ranks - 1).
    """
    if not len(gradients):
        return False
    numbers = torch.finfo(gradients.dtype)
    largest = float(torch.linalg.vector_norm(gradients, float("inf")))
    return not largest * ranks * (1 + numbers.eps / 2) ** (ranks - 1) <= numbers.max  # true of a NaN


def unscaled(gradients: Tensor, into: Tensor, scale: float) -> None:
    """Write them into a buffer of the optimizer's dtype, divided by `scale`."""
    into.copy_(gradients)
    if scale != 1:
        into.div_(scale)
